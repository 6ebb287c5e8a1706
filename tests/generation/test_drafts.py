# SPDX-License-Identifier: Apache-2.0
"""Sources of drafts."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from dcp_compile.generation.drafts import CausalLMProposer, PromptLookup, Proposal, Sampling
from tests.generation.helpers import chi_square_p, fresh_seeds

GREEDY = Sampling(False, LogitsProcessorList())


def lookup(sequence, limit, max_ngram=2):
    proposal = PromptLookup(max_ngram).propose([torch.tensor(sequence)], [limit])
    assert proposal.probs is None
    return proposal.tokens[0, : proposal.counts[0]].tolist()


@pytest.mark.parametrize(
    ("sequence", "limit", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 3, [3, 4, 1]),
        ([1, 2, 3, 4, 1, 2], 9, [3, 4, 1, 2]),
        ([1, 2, 9, 1, 2, 8, 1, 2], 1, [8]),  # the latest occurrence
        ([1, 2, 9, 1, 2, 8, 1, 2], 5, [9, 1, 2, 8, 1]),  # the latest with enough behind it
        ([7, 7, 7, 7], 3, [7, 7]),  # a periodic text: the longest continuation
        ([4, 5, 6, 5], 2, [6, 5]),  # falls back to shorter tails
        ([1, 2, 3], 4, []),
        ([1], 4, []),
        ([1, 2, 1], 0, []),
    ],
)
def test_prompt_lookup(sequence, limit, expected):
    assert lookup(sequence, limit) == expected


@pytest.mark.parametrize("seed", fresh_seeds("drafts", 5))
def test_prompt_lookup_copies_what_followed_the_longest_known_tail(seed):
    draw = random.Random(seed)
    for _ in range(40):
        sequence = [draw.randrange(4) for _ in range(draw.randrange(1, 24))]
        limit, longest = draw.randrange(1, 6), draw.randrange(1, 4)
        found = lookup(sequence, limit, longest)
        for size in range(min(longest, len(sequence) - 1), 0, -1):
            after = [
                i + size
                for i in range(len(sequence) - size)
                if sequence[i : i + size] == sequence[len(sequence) - size :]
            ]
            if after:
                assert found in [sequence[i : i + limit] for i in after]
                assert len(found) == max(min(limit, len(sequence) - i) for i in after)
                break
        else:
            assert found == []


def test_stacked_proposals_are_padded():
    proposal = Proposal.stack([torch.tensor([4, 5]), torch.tensor([], dtype=torch.int64), torch.tensor([6])])
    assert proposal.counts == [2, 0, 1] and proposal.tokens.dtype == torch.int64
    assert proposal.tokens[0].tolist() == [4, 5] and proposal.tokens[2, 0] == 6
    probs = [torch.ones(2, 3), torch.ones(0, 3), torch.ones(1, 3)]
    assert Proposal.stack([torch.tensor([4, 5]), torch.tensor([]).long(), torch.tensor([6])], probs).probs.shape == (
        3,
        2,
        3,
    )
    nothing = Proposal.stack([torch.tensor([]).long()] * 2)
    assert nothing.tokens.shape == (2, 0) and nothing.counts == [0, 0]


def continue_greedily(model, sequence, count):
    for _ in range(count):
        sequence = sequence + [int(model(torch.tensor([sequence]), use_cache=False).logits[0, -1].argmax())]
    return sequence


@torch.no_grad()
def test_causal_lm_follows_whatever_was_kept(pair):
    """Rejections, full acceptance, skipped rows and limits of every size leave its caches right."""
    proposer = CausalLMProposer(pair.plain)
    sequences = [[5, 6, 7], [9, 8, 7, 6, 5]]
    proposer.begin(None, [torch.tensor(sequence) for sequence in sequences], GREEDY)
    sequences = [sequence + [11] for sequence in sequences]
    # limits, then per row how many drafts are kept and what token follows them
    steps = [
        ([3, 1], [(3, 4), (0, 9)]),
        ([2, 3], [(0, 8), (2, 3)]),
        ([1, 0], [(1, 5), None]),
        ([0, 3], [None, (3, 6)]),
        ([3, 2], None),
    ]
    for limits, outcome in steps:
        proposal = proposer.propose([torch.tensor(sequence) for sequence in sequences], limits)
        assert proposal.counts == limits and proposal.probs is None
        for row, limit in enumerate(limits):
            drafted = proposal.tokens[row, :limit].tolist()
            assert drafted == continue_greedily(pair.plain, sequences[row], limit)[len(sequences[row]) :]
            if outcome is not None and outcome[row] is not None:
                kept, following = outcome[row]
                sequences[row] = sequences[row] + drafted[:kept] + [following]
        proposer.commit([0, 0])
    proposer.close()


@torch.no_grad()
def test_causal_lm_returns_what_it_drew_from(pair):
    warpers = LogitsProcessorList([TemperatureLogitsWarper(1.5), TopKLogitsWarper(4)])
    torch.manual_seed(8)
    proposer = CausalLMProposer(pair.plain)
    sequences = [[5, 6, 7], [9, 8]]
    proposer.begin(None, [torch.tensor(sequence) for sequence in sequences], Sampling(True, warpers))
    proposal = proposer.propose([torch.tensor(sequence + [4]) for sequence in sequences], [3, 2])
    assert proposal.probs.shape == (2, 3, pair.engine.vocab_size) and proposal.probs.dtype == torch.float32
    for row, count in enumerate(proposal.counts):
        drafted = proposal.tokens[row, :count].tolist()
        for i in range(count):
            logits = pair.plain(torch.tensor([sequences[row] + [4] + drafted[:i]]), use_cache=False).logits[:, -1]
            expected = warpers(None, logits)[0].softmax(-1)
            torch.testing.assert_close(proposal.probs[row, i], expected, atol=1e-4, rtol=1e-4)
            assert proposal.probs[row, i, drafted[i]] > 0


def test_sampling_picks_from_the_warped_distribution():
    torch.manual_seed(4)
    logits = torch.tensor([[0.3, 1.2, -0.5, 0.9]])
    tokens, probs = GREEDY.pick(logits)
    assert tokens.tolist() == [1] and probs is None
    sampling = Sampling(True, LogitsProcessorList([TopKLogitsWarper(3)]))
    tokens, probs = sampling.pick(logits.expand(4000, 4))
    torch.testing.assert_close(
        probs[0], logits[0].masked_fill(torch.tensor([0, 0, 1, 0]).bool(), -torch.inf).softmax(0)
    )
    assert chi_square_p(torch.bincount(tokens, minlength=4), probs[0]) > 1e-3
