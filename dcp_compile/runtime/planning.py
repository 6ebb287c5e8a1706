# SPDX-License-Identifier: Apache-2.0
"""Plans of prefix calls, made on the host between steps and kept for many of them.

The entries of committed tokens never change. So a prefix may end anywhere before a request's committed length: a plan
made some steps ago is still right, and the tail call sees what has come since. A step with an old plan is given the
prefix lengths of that plan, by which the prologue tells the tail where the prefix ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import layout
from ..backends import AttentionRequirements, PlanningBackend
from ..lower import StepProgram

LONGEST_TAIL = 64
"""Committed tokens per rank in a tail before a plan is renewed; so many cost its kernel hardly more than one."""


class Unplanned:
    """What stands for the plan of a program that needs none."""

    def __init__(self, size: tuple[int, int, int] | None = None):
        pass

    def prepare(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The inputs as they are."""
        return inputs

    def __enter__(self) -> Unplanned:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class StandingPlan:
    """A plan of a backend, renewed when it no longer serves. As a context: calls of the backend use it.

    Args:
        place: rank, ranks and interleave of the cache.
        size: requests, rows per request and block-table columns of the captured steps it serves, fewer requests and rows
            being filled up; None: steps of any size, none of them captured.
    """

    def __init__(
        self,
        backend: PlanningBackend,
        need: AttentionRequirements,
        scale: float,
        device: torch.device,
        place: tuple[int, int, int],
        size: tuple[int, int, int] | None = None,
    ):
        self._requests, self._step_rows, columns = size or (None, None, None)
        self._plan = backend.plan(need, scale, device, size and (self._requests, columns))
        self._page_size, self._place = need.page_size, place
        self._rows = 0
        self._lengths = self._pages = torch.zeros(0)

    def prepare(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The step's inputs with the planned prefix lengths; plans anew if the last plan does not serve them.

        Args:
            inputs: host tensors, as in docs/architecture.md.
        """
        requests, rows = inputs["positions"].shape
        rows = self._step_rows or rows
        missing = (self._requests or requests) - requests
        lengths = pad(inputs["prefix_lengths"], (0, missing))
        table = pad(inputs["block_table"], (0, 0, 0, missing))
        if not self._serves(lengths, table, rows):
            bounds = layout.local_length(lengths, *self._place)
            self._plan.update(table, bounds, rows)
            self._rows, self._lengths = rows, lengths.clone()  # inputs may be buffers
            self._pages = _pages_in_use(table, bounds, self._page_size)
        return {**inputs, "prefix_lengths": self._lengths[:requests]}

    def _serves(self, lengths: Tensor, table: Tensor, rows: int) -> bool:
        """Whether every planned prefix is committed, lies on the pages it was planned on, and leaves a short tail."""
        if rows != self._rows or lengths.shape != self._lengths.shape:
            return False
        tails = lengths - self._lengths
        if tails.min() < 0 or tails.max() > LONGEST_TAIL * self._place[1]:
            return False
        bounds = layout.local_length(self._lengths, *self._place)
        return torch.equal(_pages_in_use(table, bounds, self._page_size), self._pages)

    def __enter__(self) -> StandingPlan:
        self._plan.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._plan.__exit__(*exception)


Plans = Callable[[tuple[int, int, int] | None], StandingPlan | Unplanned]
"""Makes the plan of captured steps of a size, or of all others."""


def planned(program: StepProgram, plan: StandingPlan | Unplanned) -> StepProgram:
    """The program, run step by step under its plan."""

    def run(inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        inputs = plan.prepare(inputs)
        with plan:
            return program(inputs)

    return run


def _pages_in_use(table: Tensor, bounds: Tensor, page_size: int) -> Tensor:
    """The columns of the block table that hold any of the prefixes, 0 where a request's own has ended."""
    pages = -(-bounds // page_size)
    columns = int(pages.max())
    return torch.where(torch.arange(columns) < pages[:, None], table[:, :columns], 0)
