# SPDX-License-Identifier: Apache-2.0
"""How many draft tokens of each row a verify step judges.

A schedule decides how fast tokens come, never which. For that the decision whether d_k of a row is verified must not
depend on d_k itself, nor on what was drafted after it: given d_1 .. d_{k-1} it is then independent of d_k ~ q_k, so that
whatever is verified is judged as a draft of that length would be, and the first token that is not verified is drawn from
the target. (Both rules keep the prefix d_1 .. d_i with a probability that depends on d_1 .. d_i alone, so the length may
be decided as the drafts are revealed one by one.) Other rows may take part in the decision: their drafts are independent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

from ..runtime.costs import StepCosts
from .drafts import Proposal

_MEMORY = 0.98  # share of its weight that an observation keeps per step


class Schedule(Protocol):
    """Called in this order every round, with the same values on all ranks except for the proposal."""

    def before(self, limits: Sequence[int], runs: Sequence[bool]) -> list[int]:
        """Most tokens to draft per row, at most ``limits``; ``runs`` marks the rows that have not finished."""
        ...

    def after(self, proposal: Proposal, runs: Sequence[bool]) -> list[int]:
        """Tokens of the proposal to verify per row, at most its counts. The leader's decision counts."""
        ...

    def learn(self, verified: Sequence[int], accepted: Sequence[int]) -> None:
        """Of the first ``verified[row]`` drafts the first ``accepted[row]`` were accepted."""
        ...


class WholeDrafts:
    """Verify every draft in full."""

    def before(self, limits: Sequence[int], runs: Sequence[bool]) -> list[int]:
        return list(limits)

    def after(self, proposal: Proposal, runs: Sequence[bool]) -> list[int]:
        return list(proposal.counts)

    def learn(self, verified: Sequence[int], accepted: Sequence[int]) -> None:
        pass


class ByConfidence(WholeDrafts):
    """Verify as much as the draft's own confidences promise to pay for.

    The confidence of d_k is computed from d_1 .. d_{k-1} and the block's hidden state, which holds no drafted token.

    Args:
        verify, draft: times of the steps; None = drafting takes no time.
    """

    def __init__(self, verify: StepCosts, draft: StepCosts | None = None) -> None:
        self._verify, self._draft = verify, draft

    def after(self, proposal: Proposal, runs: Sequence[bool]) -> list[int]:
        if proposal.confidences is None:  # nothing was drafted
            return list(proposal.counts)
        chances = [row[:count] for row, count in zip(proposal.confidences.tolist(), proposal.counts)]
        return choose_lengths(chances, runs, round_seconds(self._verify, self._draft, len(runs)))


class ByAcceptanceRate(WholeDrafts):
    """Draft as much as the running acceptance rate of each position promises to pay for; it knows past rounds only.

    A rate starts at 1 and, where nothing is tried any more, returns to it: rounds that draft little are not for ever.

    Args:
        width: most draft tokens per row. Others as for :class:`ByConfidence`.
    """

    def __init__(self, width: int, verify: StepCosts, draft: StepCosts | None = None) -> None:
        self._verify, self._draft = verify, draft
        self._tried, self._accepted = [0.0] * width, [0.0] * width

    @property
    def rates(self) -> list[float]:
        """Estimated chance of each position to be accepted once all before it are."""
        return [(1.0 + accepted) / (1.0 + tried) for accepted, tried in zip(self._accepted, self._tried)]

    def before(self, limits: Sequence[int], runs: Sequence[bool]) -> list[int]:
        chances = [self.rates[:limit] for limit in limits]
        return choose_lengths(chances, runs, round_seconds(self._verify, self._draft, len(runs)))

    def learn(self, verified: Sequence[int], accepted: Sequence[int]) -> None:
        self._tried = [_MEMORY * count for count in self._tried]
        self._accepted = [_MEMORY * count for count in self._accepted]
        for judged, kept in zip(verified, accepted):
            for position in range(min(judged, kept + 1)):
                self._tried[position] += 1.0
                self._accepted[position] += position < kept


def round_seconds(verify: StepCosts, draft: StepCosts | None, requests: int) -> Callable[[int], float]:
    """Seconds of a round, draft block included, by rows verified."""
    drafting = 0.0 if draft is None else draft.seconds(requests, 0)
    return lambda rows: drafting + verify.seconds(requests, rows)


def choose_lengths(
    chances: Sequence[Sequence[float]], runs: Sequence[bool], seconds: Callable[[int], float]
) -> list[int]:
    """Draft tokens per row that maximise expected tokens per second.

    Every running row commits one token, and draft k of it another one with probability c_1 ... c_k. Drafts are admitted
    from the likeliest to the least likely one until one of them does not raise the rate. To stop there, and not to look
    for a better length beyond, is what keeps verification lossless: what decides on d_k are chances at least as large as
    its own, and those of its row belong to d_1 .. d_k.

    Args:
        chances: c_k of each row's drafts, given that those before it are accepted. seconds: of a round, by rows.
    """
    survival = [list(itertools.accumulate(row, lambda before, chance: before * chance)) for row in chances]
    drafts = sorted((-share, place, row) for row, shares in enumerate(survival) for place, share in enumerate(shares))
    lengths, rows = [0] * len(chances), sum(runs)
    expected = float(rows)
    best = expected / seconds(rows)
    for share, _, row in drafts:
        rate = (expected - share) / seconds(rows + 1)
        if rate <= best:
            break
        best, expected, rows = rate, expected - share, rows + 1
        lengths[row] += 1
    return lengths
