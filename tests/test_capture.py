# SPDX-License-Identifier: Apache-2.0
"""Captured graphs: what their inputs stand for, that the model is left alone, and what cannot be captured."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM

from dcp_compile._compat import get_implementations
from dcp_compile.capture import ATTENTION_NAME, STEP_INPUTS, StateRef, StepGraph, capture
from dcp_compile.errors import CaptureError, UnsupportedModelError
from dcp_compile.passes.graph_tools import MARKERS, census, dcp, nodes_of, value
from tests.mla_variants import Variant, vary
from tests.model_state import changes, state_of
from tests.tiny_models import VOCAB, tiny_deepseek_v3, tiny_kimi_linear


@pytest.fixture(scope="module")
def hybrid() -> tuple[torch.nn.Module, StepGraph]:
    """A model of one recurrent and one attention layer in two-byte weights, with experts of the eager kind."""
    model = tiny_kimi_linear(2, dtype=torch.bfloat16)
    model.config._experts_implementation = "eager"
    before = state_of(model)
    graph = capture(model)
    assert changes(before, state_of(model)) == []
    return model, graph


def test_every_graph_input_is_known(hybrid) -> None:
    model, graph = hybrid
    placeholders = graph.graph.find_nodes(op="placeholder")
    known = [*graph.step_inputs, *graph.states, *graph.constants]
    assert known == placeholders and len(set(known)) == len(known)
    assert tuple(graph.step_inputs.values()) == STEP_INPUTS
    storage = [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
    assert [tensor.data_ptr() for tensor in graph.constants.values()] == storage
    assert graph.outputs == ("logits",) and graph.model == "KimiLinearForCausalLM"
    assert graph.capture_seconds > 0


def test_states_of_each_layer(hybrid) -> None:
    _, graph = hybrid
    recurrent = ["conv_state", "conv_pending", "state", "pending_k", "pending_u", "pending_g"]
    assert set(graph.states.values()) == {StateRef(0, kind) for kind in recurrent} | {StateRef(1, "kv_cache")}
    kinds = {ref.kind: value(node).dtype for node, ref in graph.states.items()}
    assert {kind for kind, dtype in kinds.items() if dtype == torch.float32} == {
        "state",
        "pending_k",
        "pending_u",
        "pending_g",
    }
    assert {dtype for kind, dtype in kinds.items() if "conv" in kind or kind == "kv_cache"} == {torch.bfloat16}


def test_one_marker_of_each_kind_per_layer(hybrid) -> None:
    _, graph = hybrid
    assert sorted(node.target.name() for node in nodes_of(graph.graph, *MARKERS)) == [
        "dcp::mark_attention", "dcp::mark_conv", "dcp::mark_latent", "dcp::mark_recurrence",
    ]  # fmt: skip


def test_sizes_are_symbols_and_only_wanted_rows_have_logits(hybrid) -> None:
    _, graph = hybrid
    inputs = {name: value(node) for node, name in graph.step_inputs.items()}
    logits = value(graph.graph.find_nodes(op="output")[0].args[0][0])
    assert str(logits.shape[0]) == str(inputs["logit_rows"].shape[0]) and logits.shape[1] == VOCAB
    assert all(isinstance(size, torch.SymInt) for fake in inputs.values() for size in fake.shape)
    rows = {str(inputs[name].shape[0]) for name in ("input_ids", "row_positions")}
    batch = {
        str(inputs[name].shape[0]) for name in ("positions", "block_table", "prefix_lengths", "state_slots", "accepted")
    }
    assert len(rows) == len(batch) == 1 and rows != batch


def test_nodes_know_the_module_they_come_from(hybrid) -> None:
    _, graph = hybrid
    (attention,) = nodes_of(graph.graph, dcp.mark_attention.default)
    assert list(attention.meta["nn_module_stack"])[-1] == "model.layers.1.self_attn"


def test_a_copy_is_independent(hybrid) -> None:
    _, graph = hybrid
    twin = graph.copy()
    listing = [node.format_node() for node in graph.graph.nodes]
    assert [node.format_node() for node in twin.graph.nodes] == listing
    assert list(twin.step_inputs.values()) == list(graph.step_inputs.values())
    assert list(twin.states.values()) == list(graph.states.values())
    assert all(mine is others for mine, others in zip(twin.constants.values(), graph.constants.values()))
    assert not {*twin.step_inputs, *twin.states, *twin.constants} & set(graph.graph.nodes)
    for node in list(twin.graph.nodes)[-3:-1]:
        node.meta["val"] = None
    next(iter(twin.states)).meta["val"] = None
    output = twin.graph.find_nodes(op="output")[0]
    output.args = ((next(iter(twin.constants)),),)
    twin.graph.eliminate_dead_code()
    assert [node.format_node() for node in graph.graph.nodes] == listing
    assert all(node.meta.get("val") is not None for node in graph.graph.nodes if node.op != "output")


def test_a_rewritten_graph_cannot_be_copied(hybrid) -> None:
    """Its attention calls and its prologue belong to one graph."""
    _, graph = hybrid
    rewritten = dataclasses.replace(graph, attention={1: object()})
    with pytest.raises(ValueError, match="rewritten"):
        rewritten.copy()


class WithTaps(DeepseekV3ForCausalLM):
    """Returns a multiple of its logits as a further field."""

    def forward(self, *args, times: int = 1, **kwargs):
        out = super().forward(*args, **kwargs)
        out["taps"] = out.logits * times
        return out


def test_further_outputs_and_options_of_forward() -> None:
    model = vary(Variant)
    model.__class__ = WithTaps
    graph = capture(model, ("taps",), times=3)
    assert graph.outputs == ("logits", "taps")
    logits, taps = graph.graph.find_nodes(op="output")[0].args[0]
    assert value(logits).shape == value(taps).shape
    assert 3 in [argument for node in graph.graph.nodes for argument in node.args if node.op == "call_function"]


def test_tied_weights_are_one_input() -> None:
    model = tiny_deepseek_v3(1, first_k_dense_replace=1, tie_word_embeddings=True)
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    graph = capture(model)
    held = [tensor.data_ptr() for tensor in graph.constants.values()]
    assert held.count(model.lm_head.weight.data_ptr()) == 1


# --- what cannot be captured -----------------------------------------------------------------------------------------


class AsksForRows(Variant):
    """Computes something else for many rows."""

    def forward(self, hidden_states, *args, **kwargs):
        if hidden_states.shape[0] > 3:
            hidden_states = 2 * hidden_states
        return super().forward(hidden_states, *args, **kwargs)


class AsksForOneSize(Variant):
    def forward(self, hidden_states, *args, **kwargs):
        if hidden_states.shape[0] == 5:
            hidden_states = 2 * hidden_states
        return super().forward(hidden_states, *args, **kwargs)


class AsksForValues(Variant):
    def forward(self, hidden_states, *args, **kwargs):
        if hidden_states.sum() > 0:
            hidden_states = 2 * hidden_states
        return super().forward(hidden_states, *args, **kwargs)


class Breaks(Variant):
    def forward(self, hidden_states, *args, **kwargs):
        raise KeyError("something inside the model")


@pytest.mark.parametrize("kind, message", [
    (AsksForRows, r"DeepseekV3ForCausalLM computes differently for .* rows.* > 3 \(.*test_capture.py:\d+\)"),
    (AsksForOneSize, "DeepseekV3ForCausalLM computes differently for different numbers of rows.* = 5"),
    (AsksForValues, "DeepseekV3ForCausalLM could not be traced: .*control flow that depends on tensor values"),
    (Breaks, "DeepseekV3ForCausalLM could not be traced: KeyError: 'something inside the model'"),
])  # fmt: skip
def test_a_model_that_cannot_be_traced_is_left_as_it_was(kind: type[Variant], message: str) -> None:
    model = vary(kind)
    before = state_of(model)
    with pytest.raises(CaptureError, match=f"(?s){message}"):
        capture(model)
    assert changes(before, state_of(model)) == []
    assert get_implementations(model).attention != ATTENTION_NAME
    assert not torch.compiler.is_compiling()


def test_layers_of_another_kind_are_named() -> None:
    model = tiny_deepseek_v3(2, first_k_dense_replace=2)
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(UnsupportedModelError, match="DeepseekV3ForCausalLM has layers of type sliding_attention"):
        capture(model)


def test_a_layer_that_runs_twice_is_refused() -> None:
    """Two calls on one cache entry."""

    class Twice(Variant):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)[0] + super().forward(*args, **kwargs)[0], None

    with pytest.raises(
        UnsupportedModelError, match=r"expected one latent call in each of the layers \[0\], found them in \[0, 0\]"
    ):
        capture(vary(Twice))


def test_markers_do_not_leak_into_other_models(hybrid) -> None:
    """After a capture, another model of the same file still computes."""
    model = tiny_kimi_linear(2)
    with torch.no_grad():
        logits = model(torch.tensor([[3, 4, 5]]), use_cache=False).logits
    assert logits.isfinite().all()
    assert sum(count for name, count in census(hybrid[1].graph).items() if name.startswith("dcp::mark")) == 4


class _Adapted(nn.Module):
    """A projection and a low-rank one beside it, whose first half it shares with another."""

    def __init__(self, base: nn.Linear, down: nn.Linear):
        super().__init__()
        self.base, self.down = base, down
        self.up = nn.Linear(down.out_features, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def test_a_module_with_two_paths_keeps_its_parameters() -> None:
    model = tiny_deepseek_v3(1, first_k_dense_replace=1)
    mlp = model.model.layers[0].mlp
    down = nn.Linear(mlp.gate_proj.in_features, 3, bias=False)
    mlp.gate_proj, mlp.up_proj = _Adapted(mlp.gate_proj, down), _Adapted(mlp.up_proj, down)
    before = state_of(model)
    graph = capture(model)
    assert changes(before, state_of(model)) == []
    assert sum(constant is down.weight for constant in graph.constants.values()) == 1
