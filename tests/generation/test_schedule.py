# SPDX-License-Identifier: Apache-2.0
"""Adaptive verification: what it verifies, and that it changes no token and no distribution."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

from dcp_compile.generation.call import DecodeCall
from dcp_compile.generation.drafts import Proposal
from dcp_compile.generation.loop import decode_speculative
from dcp_compile.generation.schedule import ByAcceptanceRate, ByConfidence, WholeDrafts, choose_lengths
from dcp_compile.runtime.costs import StepCosts
from tests.generation.helpers import Scripted, chi_square_p, fresh_seeds, prompts, sometimes_wrong, wrong
from tests.generation.markov import MarkovDraft, MarkovEngine

SLOW = StepCosts({3: {3: 1.0, 24: 5.0}})  # every further row per request costs more than half a step


def line(per_row: float):
    return lambda rows: 1.0 + per_row * rows


def test_times_between_and_beyond_what_was_measured() -> None:
    costs = StepCosts({1: {1: 2.0, 2: 4.0, 4: 5.0}, 4: {4: 6.0, 16: 12.0}})
    assert [costs.seconds(1, rows) for rows in (0, 1, 2, 3, 4)] == [2.0, 2.0, 4.0, 4.5, 5.0]
    assert [costs.seconds(3, rows) for rows in (2, 4, 10, 16)] == [6.0, 6.0, 9.0, 12.0]


@pytest.mark.parametrize(
    ("chances", "runs", "per_row", "lengths"),
    [
        ([[0.9, 0.9, 0.9]], [True], 0.1, [3]),
        ([[0.1, 0.9, 0.9]], [True], 0.2, [0]),  # plain decoding
        ([[0.9, 0.1, 0.9]], [True], 0.2, [1]),
        ([[0.9, 0.9], [0.05, 0.9]], [True, True], 0.3, [2, 0]),  # a ragged batch
        ([[0.9, 0.9], [], [0.6]], [True, False, True], 0.1, [2, 0, 1]),
        ([[], []], [True, True], 0.1, [0, 0]),
        ([[0.01, 0.01]], [True], 0.0, [2]),  # rows that cost nothing
        ([[0.0, 0.9]], [True], 0.0, [0]),
    ],
)
def test_likely_drafts_are_verified_and_unlikely_ones_are_not(chances, runs, per_row, lengths) -> None:
    assert choose_lengths(chances, runs, line(per_row)) == lengths


@pytest.mark.parametrize("seed", fresh_seeds("schedule", 3))
def test_no_other_lengths_promise_more(seed: int) -> None:
    """Where further rows do not get cheaper, stopping early finds the best lengths of all."""
    draw = random.Random(seed)
    for _ in range(60):
        chances = [[draw.random() for _ in range(draw.randrange(4))] for _ in range(draw.randrange(1, 4))]
        bend, steep = draw.random(), draw.random()
        seconds = lambda rows: 0.5 + 0.2 * rows * bend + 0.1 * steep * rows**2  # noqa: E731

        def rate(lengths) -> float:
            expected = sum(
                1 + sum(itertools.accumulate(row[:length], lambda a, b: a * b)) for row, length in zip(chances, lengths)
            )
            return expected / seconds(len(chances) + sum(lengths))

        best = max(rate(lengths) for lengths in itertools.product(*(range(len(row) + 1) for row in chances)))
        assert rate(choose_lengths(chances, [True] * len(chances), seconds)) == pytest.approx(best)


@pytest.mark.parametrize("seed", fresh_seeds("peeking", 3))
def test_what_follows_a_draft_has_no_say_in_verifying_it(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        chances = [[draw.random() for _ in range(4)] for _ in range(3)]
        per_row = draw.random()
        row, place = draw.randrange(3), draw.randrange(3)
        verified = choose_lengths(chances, [True] * 3, line(per_row))[row] > place
        chances[row][place + 1 :] = [draw.random() for _ in chances[row][place + 1 :]]
        assert (choose_lengths(chances, [True] * 3, line(per_row))[row] > place) == verified


def test_rates_follow_what_is_accepted_and_recover() -> None:
    schedule = ByAcceptanceRate(3, StepCosts({2: {2: 1.0, 16: 4.0}}))
    assert schedule.before([3, 2], [True, True]) == [3, 2]
    for _ in range(20):
        schedule.learn([3, 2], [1, 0])
    first, second, third = schedule.rates
    assert 0.4 < first < 0.6 and second < 0.2 and third == 1.0
    assert schedule.before([3, 3], [True, True]) == [1, 1]
    for _ in range(400):
        schedule.learn([0, 0], [0, 0])
    assert schedule.before([3, 3], [True, True]) == [3, 3]


def test_a_useless_draft_is_given_up(qwen, monkeypatch) -> None:
    """Most rounds decode a single token, and the text is the same."""
    monkeypatch.setattr(qwen.engine, "verify_costs", SLOW)
    inputs = prompts(51, [5, 8, 3])
    script = qwen.continuation(inputs, 60)
    expected = [row[length : length + 40] for row, length in zip(script, (5, 8, 3))]
    options = {**inputs, "do_sample": False, "max_new_tokens": 40, "eos_token_id": None}
    for corrupt, least, most in ((wrong, 0, 60), (lambda row, at, token: token, 90, 117), (sometimes_wrong, 0, 117)):
        before = qwen.engine.drafted
        found = qwen.compiled.generate(**options, assistant_model=Scripted(script, corrupt))
        assert found[:, 8:].tolist() == expected
        assert least <= qwen.engine.drafted - before <= most
    assert qwen.compiled.generate(**options, prompt_lookup_num_tokens=4)[:, 8:].tolist() == expected
    assert qwen.compiled.generate(**options, assistant_model=qwen.make(seed=4))[:, 8:].tolist() == expected


class Unsure(MarkovDraft):
    """Confidences that depend strongly on the token before each draft."""

    def propose(self, sequences, limits):
        proposal = super().propose(sequences, limits)
        last = torch.stack([sequence[-1] for sequence in sequences])
        before = torch.cat([last[:, None], proposal.tokens], dim=1)[:, : proposal.tokens.shape[1]]
        confidences = torch.where(before % 2 == 0, 0.95, 0.1)
        return Proposal(proposal.tokens, proposal.counts, proposal.probs, confidences)


class Peeking(WholeDrafts):
    """Verifies a draft only if it is an even token: its choice depends on the very token it is about."""

    def after(self, proposal, runs):
        odd = (proposal.tokens % 2 == 1).tolist()
        return [(row[:count] + [True]).index(True) for row, count in zip(odd, proposal.counts)]


ROWS = 500


def p_value(schedule, acceptance: str, seed: int, rounds: int = 6) -> tuple[float, MarkovEngine]:
    """Of the second to fourth tokens of many sequences, drawn with drafts, under the target's exact distribution."""
    torch.manual_seed(seed)
    engine = MarkovEngine(torch.randn(6, 6) * 1.2)
    draft = Unsure(engine.table + torch.randn(6, 6) * 0.7, one_hot=False)
    table = engine.table.softmax(-1)
    exact = table[4][:, None] * table
    exact = exact[..., None] * table
    criteria = StoppingCriteriaList([MaxLengthCriteria(7)])
    call = DecodeCall(
        input_ids=torch.tensor([[3, 4]]).expand(ROWS, 2), prompts=[torch.tensor([3, 4])] * ROWS, pads=[0] * ROWS,
        max_length=7, pad_token=0, eos_tokens=frozenset(), pads_finished=False, processors=LogitsProcessorList(),
        criteria=criteria, do_sample=True, return_dict=False, scores=False, logits=False, streamer=None, vocab_size=6,
    )  # fmt: skip
    counts = torch.zeros(6, 6, 6)
    for _ in range(rounds):
        output = decode_speculative(engine.open(ROWS, 7), call, draft, 3, acceptance, schedule())
        counts.index_put_(tuple(output[:, 2:5].T), torch.tensor(1.0), accumulate=True)
    return chi_square_p(counts, exact), engine


COSTS = StepCosts({ROWS: {ROWS: 1.0, 4 * ROWS: 2.2}})


@pytest.mark.parametrize("acceptance", ["standard", "block"])
@pytest.mark.parametrize(
    "schedule", [lambda: ByConfidence(COSTS), lambda: ByAcceptanceRate(3, COSTS)], ids=["confidence", "rate"]
)
def test_adaptive_lengths_keep_the_distribution(schedule, acceptance: str) -> None:
    p, engine = p_value(schedule, acceptance, seed=61)
    assert p > 1e-3
    assert 0.1 < engine.accepted / engine.drafted < 0.95


@pytest.mark.parametrize("acceptance", ["standard", "block"])
def test_a_length_that_depends_on_its_own_draft_does_not(acceptance: str) -> None:
    """The test above can fail."""
    assert p_value(Peeking, acceptance, seed=61)[0] < 1e-6


def test_confidences_are_obeyed_row_by_row() -> None:
    proposal = Proposal(
        torch.zeros(3, 3, dtype=torch.int64), [3, 3, 1],
        confidences=torch.tensor([[0.99, 0.98, 0.97], [0.02, 0.9, 0.9], [0.9, 0.0, 0.0]]),
    )  # fmt: skip
    costs = StepCosts({4: {4: 1.0, 16: 1.6}})
    assert ByConfidence(costs).after(proposal, [True] * 3) == [3, 0, 1]
    slow_draft = StepCosts({4: {12: 100.0}})  # once a slow draft has run, everything it found is worth a look
    assert ByConfidence(costs, slow_draft).after(proposal, [True] * 3) == [3, 3, 1]
    assert WholeDrafts().after(proposal, [True] * 3) == [3, 3, 1]
