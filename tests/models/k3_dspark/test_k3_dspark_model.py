# SPDX-License-Identifier: Apache-2.0
"""The block forward against an independent float64 reference, and the properties drafting relies on."""

import copy
import math

import pytest
import torch
from transformers import AttentionInterface, DynamicCache

from dcp_compile.errors import ConfigError
from tests.models.k3_dspark.tiny_draft import random_taps, target_heads, tiny_draft


def reference_block(model, embeds, taps, context_positions, block_positions, causal=False):
    """Hidden states [K, H] of one block of one request in float64, expanded form, no cache, complex-number rotation."""
    config = model.config
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    nope, rope, v_dim, rank = (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.kv_lora_rank)

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[name]

    base, factor, original = 50000.0, 32.0, 32768
    index = torch.arange(rope // 2, dtype=torch.float64)
    plain = base ** (-2 * index / rope)

    def turning(times):
        return rope * math.log(original / (2 * math.pi * times)) / (2 * math.log(base))

    low, high = max(math.floor(turning(32)), 0), math.ceil(turning(1))
    ramp = ((index - low) / (high - low)).clamp(0, 1)
    angular = plain / factor * ramp + plain * (1 - ramp)
    scale = (nope + rope) ** -0.5 * (0.1 * math.log(factor) + 1) ** 2

    def rotate(x, positions):  # [S, ..., rope]
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        angle = positions.double()[:, None] * angular
        turn = torch.polar(torch.ones_like(angle), angle)
        turn = turn.reshape(len(positions), *[1] * (x.dim() - 2), rope // 2)
        return torch.view_as_real(pairs * turn).flatten(-2)

    context = norm(taps.double() @ weights["context_proj.weight"].T, "context_norm.weight")
    x = embeds.double()
    rows, heads = len(block_positions), config.num_attention_heads
    for i in range(config.num_hidden_layers):
        at = f"layers.{i}."
        h = norm(x, at + "input_layernorm.weight")
        q = norm(h @ weights[at + "self_attn.q_a_proj.weight"].T, at + "self_attn.q_a_layernorm.weight")
        q = (q @ weights[at + "self_attn.q_b_proj.weight"].T).view(rows, heads, nope + rope)
        q_rope = rotate(q[..., nope:], block_positions)
        entries = []
        for states, positions in ((context, context_positions), (h, block_positions)):
            z = states @ weights[at + "self_attn.kv_a_proj_with_mqa.weight"].T
            latent = norm(z[:, :rank], at + "self_attn.kv_a_layernorm.weight")
            entries.append(torch.cat((latent, rotate(z[:, rank:], positions)), -1))
        entries = torch.cat(entries)
        kv_b = weights[at + "self_attn.kv_b_proj.weight"].view(heads, nope + v_dim, rank)
        out = []
        for head in range(heads):
            k_nope = entries[:, :rank] @ kv_b[head, :nope].T
            value = entries[:, :rank] @ kv_b[head, nope:].T
            score = (q[:, head, :nope] @ k_nope.T + q_rope[:, head] @ entries[:, rank:].T) * scale
            if causal:
                score = score.masked_fill(torch.ones_like(score).triu(len(entries) - rows + 1).bool(), -math.inf)
            out.append(score.softmax(-1) @ value)
        x = x + torch.cat(out, -1) @ weights[at + "self_attn.o_proj.weight"].T
        h = norm(x, at + "post_attention_layernorm.weight")
        gate = h @ weights[at + "mlp.gate_proj.weight"].T
        up = h @ weights[at + "mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ weights[at + "mlp.down_proj.weight"].T
    return norm(x, "final_norm.weight")


def ingested(model, taps, positions=None) -> DynamicCache:
    cache = DynamicCache()
    if positions is None:
        positions = torch.arange(taps.shape[1]).expand(taps.shape[0], -1)
    model.ingest(model.project_context(taps), positions, cache)
    return cache


def entries(cache):
    return [(layer.keys, layer.values) for layer in cache.layers]


def run_block(model, taps, embeds, first=None):
    first = taps.shape[1] if first is None else first
    positions = (first + torch.arange(embeds.shape[1])).expand(embeds.shape[0], -1)
    return model(inputs_embeds=embeds, position_ids=positions, cache=ingested(model, taps))


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("context, rows", [(0, 3), (1, 1), (9, 1), (13, 7)])
def test_block_equals_the_float64_reference(seed, attention, causal, context, rows):
    model = tiny_draft(seed, attention=attention, is_causal=causal)
    taps = random_taps(model, 2, context, seed)
    embeds = torch.randn(2, rows, 32, generator=torch.Generator().manual_seed(seed + 1))
    hidden = run_block(model, taps, embeds)
    assert hidden.shape == (2, rows, 32)
    for b in range(2):
        expected = reference_block(
            model, embeds[b], taps[b], torch.arange(context), context + torch.arange(rows), causal
        )
        torch.testing.assert_close(hidden[b].double(), expected, rtol=1e-3, atol=1e-4)


def test_float64_block_equals_the_reference_closely(seed):
    model = tiny_draft(seed, dtype=torch.float64)
    taps, embeds = random_taps(model, 1, 6, seed), torch.randn(1, 4, 32, dtype=torch.float64)
    expected = reference_block(model, embeds[0], taps[0], torch.arange(6), 6 + torch.arange(4))
    # What is left is the float32 rotation.
    torch.testing.assert_close(run_block(model, taps, embeds)[0], expected, rtol=1e-5, atol=1e-5)


def test_absorbed_attention_equals_the_expanded_form(seed):
    model = tiny_draft(seed, dtype=torch.float64)
    config, taps = model.config, random_taps(model, 2, 11, seed)
    embeds = torch.randn(2, 5, 32, dtype=torch.float64)
    seen = {}

    def absorbed(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        latent, k_rope = entries(seen["cache"])[module.layer_idx]
        w_uk, w_uv = module.kv_b_proj.weight.view(config.num_attention_heads, -1, config.kv_lora_rank).split(
            [config.qk_nope_head_dim, config.v_head_dim], dim=1
        )
        q_nope, q_rope = query.split([config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
        q_latent = torch.einsum("bhsd,hdr->bhsr", q_nope, w_uk)
        score = (q_latent @ latent.transpose(2, 3) + q_rope @ k_rope.transpose(2, 3)) * scaling
        out = torch.einsum("bhsr,hdr->bshd", score.softmax(-1) @ latent, w_uv)
        seen[module.layer_idx] = out
        return out, None

    AttentionInterface.register("absorbed_for_test", absorbed)
    expanded = run_block(model, taps, embeds)
    model.config._attn_implementation = "absorbed_for_test"
    seen["cache"] = ingested(model, taps)
    hidden = model(inputs_embeds=embeds, position_ids=11 + torch.arange(5).expand(2, -1), cache=seen["cache"])
    assert {0, 1} <= seen.keys()
    torch.testing.assert_close(hidden, expanded, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("cuts", [[1], [4, 9], [1, 2, 3, 12]])
def test_context_ingested_in_chunks_equals_one_shot(seed, cuts):
    model = tiny_draft(seed)
    taps, positions = random_taps(model, 2, 13, seed), torch.arange(13).expand(2, -1)
    whole, chunked = ingested(model, taps), DynamicCache()
    for part, where in zip(taps.tensor_split(cuts, 1), positions.tensor_split(cuts, 1), strict=True):
        model.ingest(model.project_context(part), where, chunked)
    for (latent, rope), (latent_chunked, rope_chunked) in zip(entries(whole), entries(chunked), strict=True):
        assert latent.shape == (2, 1, 13, 20) and rope.shape == (2, 1, 13, 8)
        torch.testing.assert_close(latent_chunked, latent, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rope_chunked, rope, rtol=1e-4, atol=1e-5)
    embeds = torch.randn(2, 4, 32)
    where = 13 + torch.arange(4).expand(2, -1)
    torch.testing.assert_close(
        model(inputs_embeds=embeds, position_ids=where, cache=chunked),
        model(inputs_embeds=embeds, position_ids=where, cache=whole),
        rtol=1e-4,
        atol=1e-4,
    )


def test_context_enters_without_an_input_layernorm_and_block_rows_with_it(seed):
    model = tiny_draft(seed)
    taps, embeds = random_taps(model, 1, 5, seed), torch.randn(1, 3, 32)
    before = ingested(model, taps)
    for layer in model.layers:
        layer.input_layernorm.weight.zero_()
    after = ingested(model, taps)
    for (latent, rope), (latent_after, rope_after) in zip(entries(before), entries(after), strict=True):
        assert torch.equal(latent, latent_after) and torch.equal(rope, rope_after)
    model(inputs_embeds=embeds, position_ids=torch.tensor([[5, 6, 7]]), cache=after)
    assert all(latent[:, :, 5:].eq(0).all() for latent, _ in entries(after))


def test_the_order_of_the_context_does_not_matter(seed):
    model = tiny_draft(seed)
    taps, embeds = random_taps(model, 2, 17, seed), torch.randn(2, 5, 32)
    order = torch.randperm(17, generator=torch.Generator().manual_seed(seed))
    where = 17 + torch.arange(5).expand(2, -1)
    shuffled = ingested(model, taps[:, order], order.expand(2, -1))
    hidden = model(inputs_embeds=embeds, position_ids=where, cache=shuffled)
    torch.testing.assert_close(hidden, run_block(model, taps, embeds), rtol=1e-4, atol=1e-4)
    misplaced = ingested(model, taps[:, order])
    assert (model(inputs_embeds=embeds, position_ids=where, cache=misplaced) - hidden).abs().max() > 1e-3


def test_the_block_length_changes_every_row_unless_causal(seed):
    for causal in (False, True):
        model = tiny_draft(seed, is_causal=causal)
        taps, embeds = random_taps(model, 1, 8, seed), torch.randn(1, 7, 32)
        short, long = run_block(model, taps, embeds[:, :4]), run_block(model, taps, embeds)[:, :4]
        difference = (short - long).abs().amax(-1)
        assert (difference < 1e-4).all() if causal else (difference > 1e-3).all()


def test_only_relative_positions_matter_and_they_do(seed):
    model = tiny_draft(seed, dtype=torch.float64)
    taps, embeds = random_taps(model, 1, 6, seed), torch.randn(1, 3, 32, dtype=torch.float64)
    near = run_block(model, taps, embeds)
    cache = ingested(model, taps, 100 + torch.arange(6)[None])
    far = model(inputs_embeds=embeds, position_ids=106 + torch.arange(3)[None], cache=cache)
    torch.testing.assert_close(far, near, rtol=1e-3, atol=1e-3)
    assert (run_block(model, taps, embeds, first=9) - near).abs().max() > 1e-2


def test_left_padding_of_the_context_is_hidden(seed):
    for causal in (False, True):
        model = tiny_draft(seed, is_causal=causal)
        taps, embeds = random_taps(model, 1, 6, seed), torch.randn(1, 3, 32)
        padded = torch.cat((torch.full_like(taps[:, :4], 50.0), taps), dim=1)
        positions = torch.cat((torch.zeros(4, dtype=torch.long), torch.arange(6)))[None]
        cache = ingested(model, padded, positions)
        mask = torch.ones(1, 13, dtype=torch.bool)
        mask[:, :4] = False
        hidden = model(inputs_embeds=embeds, position_ids=6 + torch.arange(3)[None], cache=cache, attention_mask=mask)
        torch.testing.assert_close(hidden, run_block(model, taps, embeds), rtol=1e-4, atol=1e-4)


def test_ids_need_a_shared_embedding_and_then_equal_embeds(seed):
    model = tiny_draft(seed)
    embed, _ = target_heads(model, seed)
    ids, positions = torch.tensor([[3, 60, 60]]), torch.arange(3)[None]
    with pytest.raises(ConfigError, match="set_input_embeddings"):
        model(input_ids=ids, position_ids=positions)
    model.set_input_embeddings(embed)
    assert torch.equal(
        model(input_ids=ids, position_ids=positions), model(inputs_embeds=embed(ids), position_ids=positions)
    )
    with pytest.raises(ConfigError, match="exactly one"):
        model(input_ids=ids, inputs_embeds=embed(ids), position_ids=positions)
    with pytest.raises(ConfigError, match="position_ids is missing"):
        model(input_ids=ids)


def test_heads_equal_their_formulas(seed):
    model = tiny_draft(seed, dtype=torch.bfloat16)
    prev, hidden = torch.tensor([[0, 5], [60, 7]]), torch.randn(2, 2, 32).bfloat16()
    w1, w2 = model.markov_head.markov_w1.weight, model.markov_head.markov_w2.weight
    assert torch.equal(model.markov_bias(prev), torch.nn.functional.linear(w1[prev], w2))
    assert model.markov_bias(prev).dtype == torch.bfloat16
    features = torch.cat((hidden, w1[prev]), -1).float()
    weight, bias = model.confidence_head.proj.weight.float()[0], model.confidence_head.proj.bias.float()
    confidence = model.confidence(hidden, prev)
    assert confidence.dtype == torch.float32 and confidence.shape == (2, 2)
    torch.testing.assert_close(confidence, ((features * weight).sum(-1) + bias).sigmoid())


def test_confidence_without_markov_features_and_without_a_head(seed):
    model = tiny_draft(seed, confidence_head_with_markov=False)
    assert model.confidence_head.proj.weight.shape == (1, 32)
    hidden = torch.randn(1, 2, 32)
    assert torch.equal(
        model.confidence(hidden, torch.tensor([[1, 2]])), model.confidence(hidden, torch.tensor([[3, 4]]))
    )
    with pytest.raises(ConfigError, match="no confidence head"):
        tiny_draft(seed, enable_confidence_head=False).confidence(hidden, torch.tensor([[1, 2]]))


def test_the_cache_sees_latents_before_expansion_and_attention_is_pluggable(seed):
    """What a graph rewriter relies on: one update and one attention call per layer, of these shapes, and one graph."""
    model = tiny_draft(seed)
    taps, embeds = random_taps(model, 2, 4, seed), torch.randn(2, 3, 32)
    updates, calls = [], []

    class Spy(DynamicCache):
        def update(self, latent, k_rope, layer_idx, *args, **kwargs):
            updates.append((tuple(latent.shape), tuple(k_rope.shape), layer_idx))
            return super().update(latent, k_rope, layer_idx, *args, **kwargs)

    def attend(module, query, key, value, attention_mask, scaling, **kwargs):
        calls.append((module.layer_idx, tuple(query.shape), tuple(key.shape), tuple(value.shape), attention_mask))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling).transpose(1, 2), None

    AttentionInterface.register("spy_for_test", attend)
    expected = run_block(model, taps, embeds)
    model.config._attn_implementation = "spy_for_test"
    cache = Spy()
    model.ingest(model.project_context(taps), torch.arange(4).expand(2, -1), cache)
    hidden = model(inputs_embeds=embeds, position_ids=4 + torch.arange(3).expand(2, -1), cache=cache)
    assert updates == [((2, 1, s, 20), (2, 1, s, 8), layer) for s in (4, 3) for layer in (0, 1)]
    assert calls == [(layer, (2, 3, 3, 18), (2, 3, 7, 18), (2, 3, 7, 12), None) for layer in (0, 1)]
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)


def test_heads_split_over_ranks_add_up(seed):
    """Head counts come from the weights, so a rank holding some of the heads computes their share of the output."""
    model = tiny_draft(seed, dtype=torch.float64, num_attention_heads=4)
    attention = model.layers[0].self_attn
    x, tables = torch.randn(2, 5, 32, dtype=torch.float64), model.rotary_emb(torch.arange(5).expand(2, -1))
    total = 0
    for rank, heads in enumerate((3, 1)):
        part = copy.deepcopy(attention)
        first = 3 * rank
        for name, width, dim in (("q_b_proj", 18, 0), ("kv_b_proj", 22, 0), ("o_proj", 12, 1)):
            whole = getattr(attention, name).weight
            getattr(part, name).weight.data = whole.narrow(dim, first * width, heads * width).clone()
        total = total + part(x, tables, None, None)
    torch.testing.assert_close(total, attention(x, tables, None, None))


def test_the_attention_implementation_can_be_switched(seed):
    model = tiny_draft(seed)
    taps, embeds = random_taps(model, 1, 4, seed), torch.randn(1, 3, 32)
    before = run_block(model, taps, embeds)
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    torch.testing.assert_close(run_block(model, taps, embeds), before, rtol=1e-4, atol=1e-4)


def test_block_and_ingestion_trace_into_one_graph_each(seed):
    model = tiny_draft(seed)
    taps, embeds = random_taps(model, 2, 4, seed), torch.randn(2, 3, 32)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def step(embeds, positions, latents, ropes):
        cache = DynamicCache()
        for layer, (latent, rope) in enumerate(zip(latents, ropes, strict=True)):
            cache.update(latent, rope, layer)
        return model(inputs_embeds=embeds, position_ids=positions, cache=cache)

    def context(taps, positions):
        return model.context_entries(model.project_context(taps), positions)

    torch._dynamo.reset()
    pairs = torch.compile(context, backend=keep, fullgraph=True)(taps, torch.arange(4).expand(2, -1))
    hidden = torch.compile(step, backend=keep, fullgraph=True)(
        embeds, 4 + torch.arange(3).expand(2, -1), [p[0] for p in pairs], [p[1] for p in pairs]
    )
    assert len(graphs) == 2
    called = [node.target for node in graphs[1].graph.nodes]
    assert called.count(torch.nn.functional.scaled_dot_product_attention) == 2
    torch.testing.assert_close(hidden, run_block(model, taps, embeds), rtol=1e-5, atol=1e-5)
