# SPDX-License-Identifier: Apache-2.0
"""The model as another library sees it: one graph with free batch and length, and the two places it can hook into."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AttentionInterface, DynamicCache

from dcp_compile.models.kimi_k3 import delta_attention
from dcp_compile.models.kimi_k3.attention import eager_attention
from dcp_compile.models.kimi_k3.layers import KimiK3RMSNorm
from dcp_compile.models.kimi_k3.residual import MixQuery, Residual, mix, restart
from tests.tiny_models import VOCAB, tiny_kimi_k3

_chunk = delta_attention.chunk_kimi_delta_attention


@torch.library.custom_op("kimi_k3_test::chunk", mutates_args=())
def opaque_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    return _chunk(query, key, value, g, beta, use_qk_l2norm_in_kernel=True)[0].contiguous()


@opaque_chunk.register_fake
def _(query, key, value, g, beta):
    return value.new_empty(value.shape)


def replacement(
    query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False
):
    return opaque_chunk(query, key, value, g, beta), None


def compiled(model, graphs, **arguments):
    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    step = torch.compile(lambda tokens: model(tokens, use_cache=False, **arguments), backend=backend, fullgraph=True)

    def run(tokens):
        torch._dynamo.mark_dynamic(tokens, 0), torch._dynamo.mark_dynamic(tokens, 1)
        with torch.no_grad():
            return step(tokens)

    return run


@pytest.mark.parametrize("experts", ["batched_mm", "grouped_mm"])
def test_one_graph_for_every_batch_and_length(experts, monkeypatch, seed):
    monkeypatch.setattr(delta_attention, "chunk_kimi_delta_attention", replacement)
    model = tiny_kimi_k3(layers=2, attn_res_block_size=1, seed=seed)
    model.set_experts_implementation(experts)
    torch.manual_seed(seed)
    graphs = []
    run = compiled(model, graphs, tap_layers=(0, 1), logits_to_keep=2)
    for shape in [(2, 7), (3, 9), (5, 40)]:
        tokens = torch.randint(VOCAB, shape)
        found = run(tokens)
        with torch.no_grad():
            wanted = model(tokens, use_cache=False, tap_layers=(0, 1), logits_to_keep=2)
        torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.taps, wanted.taps, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1
    forbidden = ("nonzero", "item", "tolist", "masked_select", "unique")
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op.startswith("call")]
    assert not [name for name in names if name.rsplit(".")[-1] in forbidden]


def test_mixtures_add_the_same_number_of_nodes_early_and_late():
    """Mixtures over more and more snapshots must not make the graph of a deep model grow faster than its depth."""
    norm, query = KimiK3RMSNorm(4, 1e-5), MixQuery(4)

    def nodes(layers):
        def run(x):
            residual = Residual(x)
            for _ in range(layers):
                y = mix(residual, norm, query)
                residual = restart(residual, y)
            return mix(residual, norm, query)

        return len(make_fx(run)(torch.randn(2, 3, 4)).graph.nodes)

    assert nodes(12) - nodes(8) == nodes(8) - nodes(4)


def test_a_registered_attention_function_gets_the_expanded_heads(seed):
    seen = []

    def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        seen.append((module.layer_idx, tuple(query.shape), tuple(key.shape), tuple(value.shape), scaling))
        mask = torch.full((query.shape[2], key.shape[2]), float("-inf")).triu(1 + key.shape[2] - query.shape[2])
        return eager_attention(module, query, key, value, mask, scaling)

    AttentionInterface.register("kimi_k3_test", attention)
    model = tiny_kimi_k3(layers=5, v_head_dim=12, seed=seed, dtype=torch.float64)
    tokens = torch.randint(VOCAB, (2, 6), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        wanted = model(tokens).logits
        model.config._attn_implementation = "kimi_k3_test"
        found = model(tokens, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
    assert seen == [(i, (2, 4, 6, 24), (2, 4, 6, 24), (2, 4, 6, 12), 24**-0.5) for i in (3, 4)]


def test_the_recurrence_is_looked_up_at_every_call(monkeypatch, seed):
    calls = []
    for name in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"):
        original = getattr(delta_attention, name)

        def record(*args, name=name, original=original, **kwargs):
            calls.append((name, kwargs["initial_state"] is not None, kwargs["output_final_state"]))
            return original(*args, **kwargs)

        monkeypatch.setattr(delta_attention, name, record)
    model = tiny_kimi_k3(layers=2, seed=seed)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([[1, 2]]), use_cache=False)
        model(torch.tensor([[1]]), cache=cache)
        model(torch.tensor([[2]]), cache=cache)
        model(torch.tensor([[3, 4]]), cache=cache)
    assert calls == [
        ("chunk_kimi_delta_attention", False, False),
        ("chunk_kimi_delta_attention", False, True),
        ("recurrent_kimi_delta_attention", True, True),
        ("chunk_kimi_delta_attention", True, True),
    ]
