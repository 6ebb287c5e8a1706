# SPDX-License-Identifier: Apache-2.0
"""The semi-autoregressive proposal around the block."""

import pytest
import torch
from transformers import DynamicCache

from dcp_compile.errors import CapacityError, ConfigError
from tests.models.k3_dspark.tiny_draft import random_taps, target_heads, tiny_draft


class Setting:
    """A draft, its target's heads, and the context of positions 0..n-1 for two requests."""

    def __init__(self, seed, n=9, **overrides):
        self.model, self.n = tiny_draft(seed, **overrides), n
        self.embed, self.head = target_heads(self.model, seed)
        self.taps = random_taps(self.model, 2, n + 12, seed)
        self.anchor = torch.tensor([5, 17])

    def cache(self, upto=None, start=0):
        cache = DynamicCache()
        self.extend(cache, start, self.n if upto is None else upto)
        return cache

    def extend(self, cache, start, stop):
        with torch.no_grad():
            positions = torch.arange(start, stop).expand(2, -1)
            self.model.ingest(self.model.project_context(self.taps[:, start:stop]), positions, cache)

    def draft(self, num_tokens, **kwargs):
        cache = kwargs.pop("cache", None) or self.cache()
        anchor, n = kwargs.pop("anchor", self.anchor), kwargs.pop("n", self.n)
        return self.model.draft_block(anchor, n, cache, self.embed, self.head, num_tokens, **kwargs)


def test_one_row_is_the_anchors_logits_plus_its_bias(seed):
    s = Setting(seed)
    block = s.draft(1)
    with torch.no_grad():
        hidden = s.model(
            inputs_embeds=s.embed(s.anchor[:, None]), position_ids=torch.full((2, 1), s.n), cache=s.cache()
        )
        logits = s.head(hidden[:, 0]) + s.model.markov_bias(s.anchor)
    assert torch.equal(block.tokens[:, 0], logits.argmax(-1))
    torch.testing.assert_close(block.logits[:, 0], logits)


@pytest.mark.parametrize("num_tokens", [2, 4, 7])
def test_greedy_block_follows_the_markov_chain(seed, num_tokens):
    s = Setting(seed)
    block = s.draft(num_tokens)
    assert block.tokens.shape == block.confidences.shape == (2, num_tokens)
    assert block.logits.shape == block.base_logits.shape == (2, num_tokens, 61)
    ids = torch.full((2, num_tokens), s.model.config.mask_token_id)
    ids[:, 0] = s.anchor
    with torch.no_grad():
        positions = s.n + torch.arange(num_tokens).expand(2, -1)
        hidden = s.model(inputs_embeds=s.embed(ids), position_ids=positions, cache=s.cache())
        prev = s.anchor
        for row in range(num_tokens):
            logits = s.head(hidden[:, row]) + s.model.markov_bias(prev)
            torch.testing.assert_close(block.logits[:, row], logits, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(block.confidences[:, row], s.model.confidence(hidden[:, row], prev))
            prev = block.logits[:, row].argmax(-1)
            assert torch.equal(block.tokens[:, row], prev)


def test_a_drawn_token_moves_later_biases_but_no_base_logits(seed):
    s = Setting(seed)
    greedy = s.draft(5)
    sampled = s.draft(5, temperature=3.0, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(greedy.base_logits, sampled.base_logits)
    bias = sampled.logits - sampled.base_logits
    prev = torch.cat((s.anchor[:, None], sampled.tokens[:, :-1]), 1)
    with torch.no_grad():
        torch.testing.assert_close(bias, s.model.markov_bias(prev), rtol=1e-4, atol=1e-4)
    for b in range(2):
        for row in range(1, 5):
            same = torch.equal(greedy.tokens[b, row - 1], sampled.tokens[b, row - 1])
            assert same == torch.equal(greedy.logits[b, row], sampled.logits[b, row])


def test_four_rows_are_not_the_first_four_of_seven(seed):
    s = Setting(seed)
    short, long = s.draft(4).base_logits, s.draft(7).base_logits[:, :4]
    assert ((short - long).abs().amax(-1) > 1e-3).all()
    causal = Setting(seed, is_causal=True)
    torch.testing.assert_close(causal.draft(4).base_logits, causal.draft(7).base_logits[:, :4], rtol=1e-4, atol=1e-4)


def test_a_proposal_leaves_only_context_in_the_cache(seed):
    s = Setting(seed)
    cache, expected = s.cache(), s.cache()
    first = s.draft(6, cache=cache)
    for layer, before in zip(cache.layers, expected.layers, strict=True):
        assert torch.equal(layer.keys, before.keys) and torch.equal(layer.values, before.values)
    assert torch.equal(s.draft(6, cache=cache).tokens, first.tokens)


@pytest.mark.parametrize("accepted", [0, 2, 6])
def test_after_rejection_the_cache_equals_one_built_from_scratch(seed, accepted):
    s = Setting(seed)
    cache, n = s.cache(), s.n
    for _ in range(2):
        s.draft(6, cache=cache, n=n)
        s.extend(cache, n, n + accepted + 1)  # the anchor and the accepted tokens
        n += accepted + 1
        if n + accepted + 1 > s.taps.shape[1]:
            break
    scratch = s.cache(upto=n)
    for layer, expected in zip(cache.layers, scratch.layers, strict=True):
        assert layer.keys.shape[2] == n
        torch.testing.assert_close(layer.keys, expected.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.values, expected.values, rtol=1e-4, atol=1e-5)


def test_ragged_requests_share_a_left_padded_cache(seed):
    s = Setting(seed, dtype=torch.float64)
    lengths, cache = [9, 5], DynamicCache()
    where = torch.tensor([list(range(9)), [0] * 4 + list(range(5))])
    taps = torch.stack((s.taps[0, :9], torch.cat((s.taps[1, 5:9], s.taps[1, :5]))))
    with torch.no_grad():
        s.model.ingest(s.model.project_context(taps), where, cache)
    mask = torch.arange(9) >= 9 - torch.tensor(lengths)[:, None]
    together = s.draft(4, cache=cache, n=torch.tensor(lengths), context_mask=mask)
    for b, length in enumerate(lengths):
        alone = s.draft(4, cache=s.cache(upto=length), n=length)
        torch.testing.assert_close(together.logits[b], alone.logits[b])


def test_sampling_follows_the_tempered_logits_and_is_reproducible(seed):
    s = Setting(seed, vocab_size=11, mask_token_id=10)
    s.anchor = torch.full((6000,), 3)
    cache = DynamicCache()
    for layer_idx, layer in enumerate(s.cache().layers):
        cache.update(layer.keys[:1].expand(6000, -1, -1, -1), layer.values[:1].expand(6000, -1, -1, -1), layer_idx)
    block = s.draft(1, cache=cache, temperature=6.0, generator=torch.Generator().manual_seed(seed))
    again = s.draft(1, cache=cache, temperature=6.0, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(block.tokens, again.tokens)
    expected = torch.softmax(block.logits[0, 0] / 6.0, -1) * 6000
    observed = torch.bincount(block.tokens[:, 0], minlength=11)
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 10 + 8 * 20**0.5, "10 degrees of freedom"


def test_model_dtype_is_kept_until_the_choice(seed):
    s = Setting(seed, dtype=torch.bfloat16)
    block = s.draft(3)
    assert block.base_logits.dtype == block.logits.dtype == torch.bfloat16
    assert block.confidences.dtype == torch.float32
    assert torch.equal(block.tokens, block.logits.argmax(-1))


def test_without_a_confidence_head_there_are_no_confidences(seed):
    assert Setting(seed, enable_confidence_head=False).draft(2).confidences is None


def test_bad_sizes_are_refused_before_the_cache_changes(seed):
    s = Setting(seed, max_position_embeddings=12)
    cache = s.cache()
    for num_tokens in (0, 8):
        with pytest.raises(ConfigError, match=f"num_tokens={num_tokens}"):
            s.draft(num_tokens, cache=cache)
    with pytest.raises(CapacityError, match="position 12, max_position_embeddings is 12"):
        s.draft(4, cache=cache)
    assert cache.get_seq_length() == s.n
    assert s.draft(3, cache=cache).tokens.shape == (2, 3)
