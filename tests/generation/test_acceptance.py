# SPDX-License-Identifier: Apache-2.0
"""Acceptance rules as functions of tensors: exact cases, losslessness, randomness."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dcp_compile.generation.acceptance import RULES, Verdict, block, greedy, standard
from tests.generation.helpers import chi_square_p

VOCAB = 5
WARPERS = {
    "none": LogitsProcessorList(),
    "temperature": LogitsProcessorList([TemperatureLogitsWarper(1.7)]),
    "top_k": LogitsProcessorList([TopKLogitsWarper(3)]),
    "temperature_top_p": LogitsProcessorList([TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.85)]),
}


def emitted(verdict: Verdict) -> list[list[int]]:
    return [row[: n + 1].tolist() for row, n in zip(verdict.tokens, verdict.accepted.tolist())]


def chain(table, first, steps):
    """Tokens ``[rows, steps]`` of the Markov chain ``table [vocab, vocab]`` after ``first [rows]``."""
    tokens, previous = [], first
    for _ in range(steps):
        previous = torch.multinomial(table[previous], 1).squeeze(1)
        tokens.append(previous)
    return torch.stack(tokens, dim=1)


def run_rule(rule, target, draft, anchors, width, counts):
    """One verify step on Markov chains; ``draft`` None drafts the most likely target token."""
    rows = len(anchors)
    if draft is None:
        drafts, previous = [], anchors
        for _ in range(width):
            previous = target[previous].argmax(dim=1)
            drafts.append(previous)
        drafts, draft_probs = torch.stack(drafts, dim=1), None
    else:
        drafts = chain(draft, anchors, width)
        draft_probs = draft[torch.cat([anchors[:, None], drafts[:, :-1]], dim=1)]
    probs = target[torch.cat([anchors[:, None], drafts], dim=1)]
    assert probs.shape == (rows, width + 1, VOCAB)
    return rule(probs, drafts, counts, draft_probs)


def finish(verdict, target, length):
    """The first ``length`` tokens of each row: what the verdict emits, continued by the target itself."""
    tokens = torch.zeros(len(verdict.tokens), length, dtype=torch.int64)
    have = (verdict.accepted + 1).clamp(max=length)
    known = torch.arange(length) < have[:, None]
    tokens = torch.where(known, verdict.tokens[:, :length], tokens)
    for i in range(1, length):
        drawn = torch.multinomial(target[tokens[:, i - 1]], 1).squeeze(1)
        tokens[:, i] = torch.where(known[:, i], tokens[:, i], drawn)
    return tokens


@pytest.mark.parametrize("warper", WARPERS)
@pytest.mark.parametrize("draft_kind", ["drawn", "one_hot"])
@pytest.mark.parametrize("name", RULES)
def test_sampling_rules_keep_the_target_distribution(name, draft_kind, warper):
    # Fixed seeds: a level of 1e-3 over many cases would otherwise fail by chance now and then.
    torch.manual_seed(17)
    target = WARPERS[warper](None, torch.randn(VOCAB, VOCAB) * 1.5).softmax(-1)
    draft = None if draft_kind == "one_hot" else (torch.randn(VOCAB, VOCAB) * 1.5).softmax(-1)
    rows, width = 6000, 3
    counts = torch.arange(rows) % (width + 1)
    anchors = torch.full((rows,), 2)
    tokens = finish(run_rule(RULES[name], target, draft, anchors, width, counts), target, width + 1)

    exact = target[2]
    for _ in range(width):
        exact = exact[..., None] * target
    cells = torch.tensor([VOCAB**i for i in range(width, -1, -1)])
    for count in range(width + 1):  # each group of rows with its own number of drafts, and all of them together
        mine = tokens[counts == count]
        seen = torch.bincount((mine * cells).sum(1), minlength=VOCAB ** (width + 1))
        assert chi_square_p(seen, exact) > 1e-3, f"{count} drafts"
    seen = torch.bincount((tokens * cells).sum(1), minlength=VOCAB ** (width + 1))
    assert chi_square_p(seen, exact) > 1e-3


def test_chi_square_notices_a_biased_rule():
    torch.manual_seed(17)
    target = (torch.randn(VOCAB, VOCAB) * 1.5).softmax(-1)
    draft = (torch.randn(VOCAB, VOCAB) * 1.5).softmax(-1)
    rows = 6000

    def biased(probs, drafts, counts, draft_probs):  # draws from p, not from the residual, after a rejection
        verdict = standard(probs, drafts, counts, draft_probs)
        following = torch.multinomial(probs[torch.arange(rows), verdict.accepted], 1)
        return Verdict(verdict.accepted, verdict.tokens.scatter(1, verdict.accepted[:, None], following))

    verdict = run_rule(biased, target, draft, torch.full((rows,), 2), 3, torch.full((rows,), 3))
    tokens = finish(verdict, target, 2)
    exact = target[2][:, None] * target
    assert chi_square_p(torch.bincount(tokens @ torch.tensor([VOCAB, 1]), minlength=VOCAB**2), exact) < 1e-6


def test_acceptance_rates_are_those_of_the_papers():
    torch.manual_seed(3)
    target = (torch.randn(VOCAB, VOCAB) * 1.5).softmax(-1)
    draft = (torch.randn(VOCAB, VOCAB) * 1.5).softmax(-1)
    rows, width = 20000, 4
    anchors, counts = torch.full((rows,), 1), torch.full((rows,), width)
    kept = {name: run_rule(rule, target, draft, anchors, width, counts).accepted for name, rule in RULES.items()}
    overlap = torch.minimum(target[1], draft[1]).sum()
    first = (kept["standard"] >= 1).double().mean()
    assert abs(first - overlap) < 4 * (overlap * (1 - overlap) / rows) ** 0.5
    gain = kept["block"].double().mean() - kept["standard"].double().mean()
    assert gain > 0.02, gain  # block verification keeps more, clearly so for four drafts


@pytest.mark.parametrize("rule", [standard, block])
def test_a_draft_from_the_target_itself_is_always_kept(rule):
    torch.manual_seed(0)
    target = (torch.randn(VOCAB, VOCAB) * 2).softmax(-1)
    counts = torch.tensor([3, 1, 0, 2] * 50)
    verdict = run_rule(rule, target, target, torch.randint(VOCAB, (200,)), 3, counts)
    assert torch.equal(verdict.accepted, counts)


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("rule", [standard, block])
def test_an_impossible_draft_is_never_kept(rule, one_hot):
    probs = torch.tensor([0.0, 0.5, 0.5, 0.0, 0.0]).expand(400, 3, VOCAB)
    draft_probs = None if one_hot else torch.tensor([0.5, 0.0, 0.0, 0.5, 0.0]).expand(400, 2, VOCAB)
    drafts = torch.tensor([[0, 3]]).expand(400, 2)
    verdict = rule(probs, drafts, torch.full((400,), 2), draft_probs)
    assert not verdict.accepted.any()
    assert set(verdict.tokens[:, 0].tolist()) == {1, 2}


@pytest.mark.parametrize("rule", [standard, block])
def test_a_draft_without_probability_of_its_own_is_rejected(rule):
    # q(d) = 0 cannot come from an honest draft; it must give neither NaN nor a kept token.
    probs = torch.full((8, 2, VOCAB), 0.2)
    draft_probs = torch.tensor([1.0, 0, 0, 0, 0]).expand(8, 1, VOCAB)
    verdict = rule(probs, torch.full((8, 1), 4), torch.ones(8, dtype=torch.int64), draft_probs)
    assert not verdict.accepted.any() and (verdict.tokens[:, 0] != 0).all()


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("rule", [standard, block])
def test_what_lies_past_the_count_is_not_read(rule, one_hot):
    torch.manual_seed(5)
    probs = torch.randn(40, 4, VOCAB).softmax(-1)
    draft_probs = None if one_hot else torch.randn(40, 3, VOCAB).softmax(-1)
    drafts = torch.randint(VOCAB, (40, 3))
    counts = torch.arange(40) % 4
    clean = rule(probs, drafts, counts, draft_probs, torch.Generator().manual_seed(1))
    past = torch.arange(4) > counts[:, None]
    poisoned = probs.masked_fill(past[..., None], torch.nan)
    if not one_hot:
        draft_probs = draft_probs.masked_fill(past[:, 1:, None], torch.nan)
    drafts = torch.where(past[:, 1:], 0, drafts)
    again = rule(poisoned, drafts, counts, draft_probs, torch.Generator().manual_seed(1))
    assert (clean.accepted <= counts).all()
    assert torch.equal(clean.accepted, again.accepted) and emitted(clean) == emitted(again)


@pytest.mark.parametrize("rule", [standard, block])
def test_randomness_comes_from_the_generator(rule):
    torch.manual_seed(9)
    probs, drafts = torch.randn(30, 4, VOCAB).softmax(-1), torch.randint(VOCAB, (30, 3))
    counts, state = torch.full((30,), 3), torch.get_rng_state()
    first = rule(probs, drafts, counts, generator=torch.Generator().manual_seed(2))
    second = rule(probs, drafts, counts, generator=torch.Generator().manual_seed(2))
    other = rule(probs, drafts, counts, generator=torch.Generator().manual_seed(3))
    assert emitted(first) == emitted(second) != emitted(other)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("rule", [standard, block])
def test_no_drafts_and_no_rows(rule):
    probs = torch.eye(VOCAB)[[3, 1]][:, None]
    verdict = rule(probs, torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    assert emitted(verdict) == [[3], [1]]
    empty = rule(torch.zeros(0, 3, VOCAB), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert empty.tokens.shape == (0, 3) and empty.accepted.shape == (0,)


def test_greedy_keeps_the_matching_prefix():
    targets = torch.tensor([[4, 2, 1], [4, 2, 1], [4, 2, 1], [4, 2, 1], [4, 2, 1]])
    scores = torch.nn.functional.one_hot(targets, VOCAB).float()
    drafts = torch.tensor([[4, 2], [4, 0], [0, 2], [4, 2], [4, 2]])
    verdict = greedy(scores, drafts, torch.tensor([2, 2, 2, 1, 0]))
    assert verdict.accepted.tolist() == [2, 1, 0, 1, 0]
    assert emitted(verdict) == [[4, 2, 1], [4, 2], [4], [4, 2], [4]]
    assert emitted(greedy(scores[:, :1], drafts[:, :0], torch.zeros(5, dtype=torch.int64))) == [[4]] * 5
