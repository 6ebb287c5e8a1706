# SPDX-License-Identifier: Apache-2.0
"""Drafting for a target: greedy output is the target's own, sampled output has the target's distribution."""

import pytest
import torch
from transformers import DynamicCache

from dcp_compile.models.k3_dspark.training import sample_anchors, training_step
from tests.models.k3_dspark.reference_loop import RULES, accept, plain_greedy, speculative_greedy
from tests.models.k3_dspark.tiny_draft import draft_for, random_taps, target_heads, tiny_draft
from tests.tiny_models import tiny_kimi_k3


def fitting_draft(target, seed, **overrides):
    draft = draft_for(target, (1, 4, 8), seed, dtype=torch.float64, **overrides)
    draft.config.check_target(target.config)
    return draft


@pytest.mark.parametrize("num_tokens, causal", [(1, False), (4, False), (7, False), (7, True)])
def test_greedy_speculation_equals_plain_greedy(seed, num_tokens, causal):
    target = tiny_kimi_k3(seed=seed, dtype=torch.float64)
    draft = fitting_draft(target, seed, is_causal=causal)
    prompt = torch.randint(3, 120, (1, 11), generator=torch.Generator().manual_seed(seed))
    expected = plain_greedy(target, prompt, 10)
    result = speculative_greedy(target, draft, prompt, 10, num_tokens)
    assert torch.equal(result.tokens, expected)
    assert 10 <= sum(result.accepted) + len(result.accepted) + 1 <= 11  # the last step may run one over


def test_a_trained_draft_is_accepted_and_changes_nothing(seed):
    target = tiny_kimi_k3(seed=seed, dtype=torch.float64, vocab_size=32)
    draft = fitting_draft(target, seed).train()
    prompt = torch.randint(3, 31, (1, 9), generator=torch.Generator().manual_seed(seed))
    expected = plain_greedy(target, prompt, 24)
    ids = torch.cat((prompt, expected[None]), 1)
    with torch.no_grad():
        out = target(ids, tap_layers=draft.config.target_layer_ids)
    embed, head = (
        layer.requires_grad_(False) for layer in (target.get_input_embeddings(), target.get_output_embeddings())
    )
    logits = 20 * out.logits  # sharpened, since the loop is greedy
    loss_mask = torch.ones_like(ids, dtype=torch.bool)
    loss_mask[:, :9] = False
    optimizer, g = torch.optim.Adam(draft.parameters(), lr=3e-3), torch.Generator().manual_seed(seed)
    for _ in range(60):
        loss = training_step(draft, out.taps, ids, logits, sample_anchors(loss_mask, 16, g), 4, loss_mask, embed, head)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    result = speculative_greedy(target, draft.eval(), prompt, 24, 4)
    assert torch.equal(result.tokens, expected)
    assert len(result.accepted) <= 12, f"accepted {result.accepted}"


VOCAB, TRIALS = 6, 8000


class BigramTarget:
    """A target whose next-token distribution depends on the last token alone, so that everything is known exactly."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.table = (1.2 * torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)).softmax(-1)

    def verify(self, anchor, drafts):
        return self.table[torch.cat((anchor[:, None], drafts), 1)]


def first_two_tokens(rule, seed, num_tokens):
    """Emitted pairs [TRIALS, 2] after a fixed anchor, over as many draft-and-verify steps as they take, and exact
    probabilities [VOCAB, VOCAB]."""
    target, generator = BigramTarget(seed), torch.Generator().manual_seed(seed)
    draft = tiny_draft(seed, dtype=torch.float64, vocab_size=VOCAB, mask_token_id=VOCAB - 1, num_hidden_layers=1)
    embed, head = target_heads(draft, seed)
    context = DynamicCache()
    with torch.no_grad():
        draft.ingest(draft.project_context(random_taps(draft, 1, 4, seed)), torch.arange(4)[None], context)
    cache = DynamicCache()
    cache.update(
        context.layers[0].keys.expand(TRIALS, -1, -1, -1), context.layers[0].values.expand(TRIALS, -1, -1, -1), 0
    )

    anchor, emitted, length = (
        torch.full((TRIALS,), 2),
        torch.zeros(TRIALS, 16, dtype=torch.long),
        torch.zeros(TRIALS).long(),
    )
    while int(length.min()) < 2:
        block = draft.draft_block(anchor, 4, cache, embed, head, num_tokens, temperature=8.0, generator=generator)
        q, p = (block.logits / 8.0).softmax(-1), target.verify(anchor, block.tokens)
        count, token = accept(rule, block.tokens, q, p, generator)
        step = torch.cat((block.tokens, token[:, None]), 1)
        step = torch.where(torch.arange(num_tokens + 1) == count[:, None], token[:, None], step)
        where = length[:, None] + torch.arange(num_tokens + 1).clamp(max=count[:, None])
        emitted.scatter_(1, where.clamp(max=15), step.gather(1, torch.arange(num_tokens + 1).clamp(max=count[:, None])))
        length, anchor = length + count + 1, token
    exact = target.table[2][:, None] * target.table
    return emitted[:, :2], exact


def excess(pairs, exact):
    """Chi-square of the pairs against the exact probabilities, in standard deviations above its mean."""
    observed = torch.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB**2)
    expected = exact.flatten() * len(pairs)
    common = expected > 5
    chi_square = ((observed - expected)[common] ** 2 / expected[common]).sum()
    degrees = int(common.sum()) - 1
    return float((chi_square - degrees) / (2 * degrees) ** 0.5)


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_sampled_speculation_has_the_targets_distribution(seed, rule, num_tokens):
    assert excess(*first_two_tokens(rule, seed, num_tokens)) < 7


def test_the_distribution_test_notices_a_wrong_rule(seed, monkeypatch):
    def always(rule, drafts, q, p, generator):
        return torch.full((len(drafts),), drafts.shape[1]), torch.multinomial(p[:, -1], 1, generator=generator)[:, 0]

    monkeypatch.setitem(first_two_tokens.__globals__, "accept", always)
    assert excess(*first_two_tokens("standard", seed, 3)) > 20
