# SPDX-License-Identifier: Apache-2.0
"""Cached, chunked and padded forward passes, and generate()."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from dcp_compile._compat import CACHE_NAME
from tests.tiny_models import VOCAB, tiny_kimi_k3, tiny_kimi_k3_8

TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def model():
    return tiny_kimi_k3(layers=5, dtype=torch.float64)


def run(model, tokens, cache, **kwargs):
    with torch.no_grad():
        return model(tokens, **{CACHE_NAME: cache}, **kwargs).logits


def full(model, tokens, **kwargs):
    with torch.no_grad():
        return model(tokens, use_cache=False, **kwargs).logits


def draw(seed, *shape):
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("build", [tiny_kimi_k3, tiny_kimi_k3_8])
@pytest.mark.parametrize("chunks", [(7, 1, 1, 1), (1,) * 8, (2, 5, 1, 3), (20, 18, 1), (3, 1, 2)])
def test_cached_equals_full(build, chunks, seed):
    model = build(seed=seed, dtype=torch.float64)
    tokens = draw(seed, 2, sum(chunks))
    cache = DynamicCache(config=model.config)
    parts = [run(model, part, cache) for part in tokens.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), full(model, tokens), rtol=0, atol=TOLERANCE)


def test_cache_holds_latents_and_key_first_states(model, seed):
    cache = DynamicCache(config=model.config)
    run(model, draw(seed, 3, 7), cache)
    config = model.config
    for layer, kind in zip(cache.layers, config.layer_types, strict=True):
        if kind == "full_attention":
            assert layer.keys.shape == (3, 1, 7, config.kv_lora_rank)
            assert layer.values.shape == (3, 1, 7, config.qk_rope_head_dim)
        else:
            heads, dim = config.linear_num_heads, config.linear_head_dim
            assert layer.recurrent_states[0].shape == (3, heads, dim, dim)
            assert layer.recurrent_states[0].dtype == torch.float64
            assert layer.conv_states[0].shape == (3, 3 * heads * dim, config.linear_conv_kernel_dim)


def test_recurrent_state_is_float32_in_a_bfloat16_model(seed):
    model = tiny_kimi_k3(layers=2, dtype=torch.bfloat16)
    cache = DynamicCache(config=model.config)
    run(model, draw(seed, 1, 3), cache)
    run(model, draw(seed + 1, 1, 1), cache)
    assert cache.layers[0].recurrent_states[0].dtype == torch.float32
    assert cache.layers[0].conv_states[0].dtype == torch.bfloat16


@pytest.mark.parametrize("lengths", [(9, 4, 1), (1, 8), (6, 6)])
def test_left_padding_changes_nothing(model, lengths, seed):
    rows = [draw(seed + i, length) for i, length in enumerate(lengths)]
    width = max(lengths)
    tokens = torch.stack([torch.cat([draw(seed + 9, width - len(row)), row]) for row in rows])
    mask = torch.stack([(torch.arange(width) >= width - length).long() for length in lengths])
    cache = DynamicCache(config=model.config)
    padded = run(model, tokens, cache, attention_mask=mask)
    more = draw(seed + 10, len(rows), 3)
    mask = torch.cat([mask, torch.ones(len(rows), 3, dtype=torch.long)], dim=1)
    first = run(model, more[:, :1], cache, attention_mask=mask[:, : width + 1])
    rest = run(model, more[:, 1:], cache, attention_mask=mask)
    for i, row in enumerate(rows):
        wanted = full(model, torch.cat([row, more[i]])[None])[0]
        found = torch.cat([padded[i, width - len(row) :], first[i], rest[i]])
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("chunk", [4, 1])
def test_padding_inside_a_later_chunk_is_masked(model, seed, chunk):
    """A prompt that is all padding in the first chunks leaves the cache as if it had not been there."""
    tokens = draw(seed, 1, 8)
    mask = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]])
    cache = DynamicCache(config=model.config)
    ends = range(chunk, 9, chunk)
    found = torch.cat([run(model, tokens[:, e - chunk : e], cache, attention_mask=mask[:, :e]) for e in ends], dim=1)
    torch.testing.assert_close(found[:, 5:], full(model, tokens[:, 5:]), rtol=0, atol=TOLERANCE)


def test_logits_to_keep(model, seed):
    tokens = draw(seed, 2, 6)
    wanted = full(model, tokens)
    some = torch.tensor([4, 0])
    for keep, kept in [(0, wanted), (1, wanted[:, -1:]), (4, wanted[:, -4:]), (some, wanted[:, [4, 0]])]:
        torch.testing.assert_close(full(model, tokens, logits_to_keep=keep), kept, rtol=0, atol=1e-12)


def test_inputs_embeds_and_positions(model, seed):
    tokens = draw(seed, 2, 6)
    wanted = full(model, tokens)
    embeds = model.get_input_embeddings()(tokens)
    with torch.no_grad():
        torch.testing.assert_close(model(inputs_embeds=embeds).logits, wanted, rtol=0, atol=0)
    positions = torch.arange(50, 56).expand(2, 6)
    torch.testing.assert_close(full(model, tokens, position_ids=positions), wanted, rtol=0, atol=0)


def test_empty_batch(model):
    model.set_attn_implementation("eager")  # transformers' own sdpa wrapper cannot do it
    try:
        assert full(model, torch.empty(0, 5, dtype=torch.long)).shape == (0, 5, VOCAB)
    finally:
        model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_cache_under_both_names(model, name, seed):
    tokens = draw(seed, 1, 5)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        out = model(tokens[:, :4], **{name: cache})
        assert out[CACHE_NAME] is cache
        last = model(tokens[:, 4:], **{name: cache}).logits
    torch.testing.assert_close(last[:, 0], full(model, tokens)[:, -1], rtol=0, atol=TOLERANCE)


def test_bad_calls_are_refused(model):
    tokens = torch.tensor([[1, 2]])
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(tokens, inputs_embeds=torch.zeros(1, 2, 64))
    with pytest.raises(ValueError, match="two names of one argument"):
        model(tokens, cache=DynamicCache(config=model.config), past_key_values=DynamicCache(config=model.config))
    with pytest.raises(ValueError, match="DynamicCache\\(config=model.config\\)"):
        model(tokens, cache=DynamicCache())
    for layer in (-1, 5):
        with pytest.raises(ValueError, match=f"no layer {layer}.*end at 4"):
            model(tokens, tap_layers=(0, layer))


def greedy(model, tokens, count):
    for _ in range(count):
        tokens = torch.cat([tokens, full(model, tokens)[:, -1:].argmax(-1)], dim=1)
    return tokens


def test_generate_equals_plain_greedy(model, seed):
    tokens = draw(seed, 2, 5)
    mask = torch.ones_like(tokens)  # else generate() takes tokens that equal the padding for padding
    found = model.generate(tokens, attention_mask=mask, max_new_tokens=7, do_sample=False, eos_token_id=None)
    assert found.tolist() == greedy(model, tokens, 7).tolist()


def test_generate_with_left_padding(model, seed):
    rows = [draw(seed, 6), draw(seed + 1, 2)]
    tokens = torch.stack([rows[0], torch.cat([torch.zeros(4, dtype=torch.long), rows[1]])])
    mask = torch.tensor([[1] * 6, [0] * 4 + [1] * 2])
    found = model.generate(
        tokens, attention_mask=mask, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    for row, ids in zip(found, rows, strict=True):
        assert row[-5:].tolist() == greedy(model, ids[None], 5)[0, -5:].tolist()


def test_generate_samples_and_beams(model, seed):
    tokens = draw(seed, 2, 4)
    torch.manual_seed(seed)
    sampled = model.generate(tokens, max_new_tokens=3, do_sample=True, num_return_sequences=2, eos_token_id=None)
    assert sampled.shape == (4, 7)
    beams = model.generate(tokens, max_new_tokens=3, do_sample=False, num_beams=3, eos_token_id=None)
    assert beams.shape == (2, 7)


def test_static_cache(model, seed):
    tokens = draw(seed, 2, 6)
    cache = StaticCache(config=model.config, max_cache_len=16)
    parts = [run(model, part, cache) for part in tokens.split((4, 1, 1), dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), full(model, tokens), rtol=0, atol=TOLERANCE)


def test_hidden_states_and_attentions(model, seed):
    """hidden_states hold the embedding and the raw prefixes, attentions come from the MLA layers."""
    tokens = draw(seed, 1, 6)
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            out = model(tokens, output_hidden_states=True, output_attentions=True, tap_layers=(3, 0))
    finally:
        model.set_attn_implementation("sdpa")
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    torch.testing.assert_close(out.taps, torch.cat([out.hidden_states[4], out.hidden_states[1]], dim=-1))
    assert [tuple(weights.shape) for weights in out.attentions] == [(1, 4, 6, 6)] * 2
    torch.testing.assert_close(out.attentions[0].sum(-1), torch.ones(1, 4, 6, dtype=torch.float64))


def test_taps_are_absent_unless_asked_for(model):
    out = model(torch.tensor([[1, 2]]), return_dict=True)
    assert out.taps is None
    assert "taps" not in out
    assert model.model(torch.tensor([[1, 2]]), tap_layers=(1,)).taps.shape == (1, 2, 64)
