# SPDX-License-Identifier: Apache-2.0
"""Convolution windows against a queue per request that is fed one input at a time."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dcp_compile.errors import CapacityError
from tests.cases import between, examples, generators, normal, strided
from tests.ops.sequences import poisoned_rows, step_positions

dcp = torch.ops.dcp


class Queues:
    """The last ``width - 1`` inputs of each request, oldest first."""

    def __init__(self, history: Tensor):
        self.inputs = [deque(rows.t().tolist(), maxlen=history.shape[2]) for rows in history]

    def feed(self, request: int, column: list[float]) -> list[list[float]]:
        """Add one input; the window that ends in it, ``[width][C]``."""
        window = [*self.inputs[request], column]
        self.inputs[request].append(column)
        return window

    def state(self, like: Tensor) -> Tensor:
        rows = [torch.tensor(list(queue), dtype=like.dtype).reshape(-1, like.shape[1]).t() for queue in self.inputs]
        return torch.stack(rows) if rows else like[:0]


@examples(80)
@given(
    generator=generators(),
    batch=st.integers(0, 3),
    rows=st.integers(0, 5),
    width=st.integers(1, 4),
    spread=st.booleans(),
)
def test_windows_of_a_step_that_commits(generator, batch: int, rows: int, width: int, spread: bool) -> None:
    channels, slots_total = between(generator, 1, 4), 5
    pool = normal(generator, slots_total, channels, width - 1)
    slots = torch.randperm(slots_total, generator=generator)[:batch].int()
    fresh = [bool(between(generator, 0, 1)) for _ in range(batch)]
    for request, is_new in enumerate(fresh):
        if is_new:
            pool[slots[request]] = 0.0
    slots = torch.where(torch.rand(batch, generator=generator) < 0.25, -1, slots)
    history = torch.where((slots >= 0)[:, None, None], pool[slots.clamp_min(0).long()], 0.0)
    positions = step_positions(generator, batch, rows, [f or s < 0 for f, s in zip(fresh, slots.tolist())])
    inputs = normal(generator, batch, rows, channels)

    queues, untouched = Queues(history), pool.clone()
    windows = {
        (request, row): queues.feed(request, inputs[request, row].tolist())
        for request in range(batch) for row in range(rows) if positions[request, row] >= 0
    }  # fmt: skip
    x = poisoned_rows(inputs, positions)[..., None]
    found = dcp.conv_window(strided(x) if spread else x, pool, strided(slots) if spread else slots, positions)

    assert found.shape == (batch * rows, channels, width) and found.is_contiguous()
    assert not found.isnan().any()
    for (request, row), window in windows.items():
        assert found[request * rows + row].t().tolist() == window
    states = queues.state(pool)
    for request, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(pool[slot], states[request])
            untouched[slot] = pool[slot]
    assert torch.equal(pool, untouched)


@examples(60)
@given(generator=generators(), batch=st.integers(1, 3), width=st.integers(1, 4), most=st.integers(1, 4))
def test_pending_inputs_are_committed_as_far_as_accepted(generator, batch: int, width: int, most: int) -> None:
    """Rounds of verify and accept, against the queue that is fed accepted inputs only."""
    channels = between(generator, 1, 3)
    pool = normal(generator, batch + 1, channels, width - 1)
    pending = normal(generator, batch + 1, channels, most)
    slots = torch.randperm(batch + 1, generator=generator)[:batch].int()
    queues = Queues(pool[slots.long()])
    accepted, previous = torch.zeros(batch, dtype=torch.int32), None
    spare = [slot for slot in range(batch + 1) if slot not in slots.tolist()][0]
    spare_state = pool[spare].clone(), pending[spare].clone()
    for _ in range(5):
        rows = between(generator, 0, most)
        counts = [between(generator, 0, rows) for _ in range(batch)]
        positions = torch.full((batch, rows), -1)
        for request, count in enumerate(counts):
            positions[request, :count] = torch.arange(count) + 7
        inputs = normal(generator, batch, rows, channels)
        found = dcp.conv_window_verify(
            poisoned_rows(inputs, positions)[..., None], pool, pending, accepted, slots, positions
        )
        for request in range(batch):
            for row in range(int(accepted[request])):
                queues.feed(request, previous[request, row].tolist())
        assert torch.equal(pool[slots.long()], queues.state(pool))
        trial = Queues(pool[slots.long()])
        for request, count in enumerate(counts):
            for row in range(count):
                assert found[request * rows + row].t().tolist() == trial.feed(request, inputs[request, row].tolist())
        assert not found.isnan().any() and found.is_contiguous()
        previous = inputs
        accepted = torch.tensor([between(generator, 0, count) for count in counts], dtype=torch.int32)
    assert torch.equal(pool[spare], spare_state[0]) and torch.equal(pending[spare], spare_state[1])


def column_state(*values: float) -> Tensor:
    return torch.tensor([[list(values)]])


def test_one_accepted_input_of_four_moves_the_window_by_one() -> None:
    """Inputs 1..7, width 4, verify [8, 9, 10, 11], accept one: [6, 7, 8], not the last window [9, 10, 11]."""
    pool, pending, slots = torch.zeros(1, 1, 3), torch.zeros(1, 1, 4), torch.zeros(1, dtype=torch.int32)
    dcp.conv_window(torch.arange(1.0, 8.0).view(7, 1, 1), pool, slots, torch.arange(7)[None])
    assert torch.equal(pool, column_state(5, 6, 7))
    none = torch.zeros(1, dtype=torch.int32)
    rows = torch.tensor([8.0, 9, 10, 11]).view(4, 1, 1)
    windows = dcp.conv_window_verify(rows, pool, pending, none, slots, torch.arange(7, 11)[None])
    assert windows[:, 0].tolist() == [[5, 6, 7, 8], [6, 7, 8, 9], [7, 8, 9, 10], [8, 9, 10, 11]]
    assert torch.equal(pool, column_state(5, 6, 7))
    dcp.conv_window_verify(torch.tensor([[[12.0]]]), pool, pending, none + 1, slots, torch.tensor([[8]]))
    assert torch.equal(pool, column_state(6, 7, 8))
    assert torch.equal(pending, column_state(12, 0, 0, 0))


@pytest.mark.parametrize(
    "accepted, state", [(0, (5, 6, 7)), (1, (6, 7, 8)), (2, (7, 8, 9)), (3, (8, 9, 10)), (4, (9, 10, 11))]
)
def test_every_count_of_accepted_inputs(accepted: int, state: tuple[float, ...]) -> None:
    pool, pending = column_state(5, 6, 7), column_state(8, 9, 10, 11)
    slots, positions = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 0, dtype=torch.int64)
    dcp.conv_window_verify(
        torch.zeros(0, 1, 1), pool, pending, torch.tensor([accepted], dtype=torch.int32), slots, positions
    )
    assert torch.equal(pool, column_state(*state))


def test_slots_may_be_a_column_of_a_table() -> None:
    """Strided index vectors, as a slice of a [B, 4] table of slots."""
    table = torch.tensor([[9, 2, 9, 9], [9, 0, 9, 9], [9, 1, 9, 9]], dtype=torch.int32)
    pool = torch.arange(3.0).view(3, 1, 1)
    found = dcp.conv_window(torch.full((3, 1, 1), 5.0), pool, table[:, 1], torch.zeros(3, 1, dtype=torch.int64))
    assert found[:, 0].tolist() == [[2.0, 5.0], [0.0, 5.0], [1.0, 5.0]]
    assert pool.flatten().tolist() == [5.0, 5.0, 5.0]


def test_a_verify_step_has_room_for_as_many_rows_as_stay_pending() -> None:
    pool, pending, slots = torch.zeros(1, 1, 1), torch.zeros(1, 1, 2), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(CapacityError, match="3 rows per request does not fit: at most 2"):
        dcp.conv_window_verify(torch.zeros(3, 1, 1), pool, pending, slots, slots, torch.arange(3)[None])


def test_state_of_a_lower_precision() -> None:
    pool, slots = torch.zeros(1, 1, 2, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    found = dcp.conv_window(torch.tensor([[[1.00390625]]]), pool, slots, torch.zeros(1, 1, dtype=torch.int64))
    assert found.dtype == torch.float32 and found[0, 0].tolist() == [0.0, 0.0, 1.00390625]
    assert pool[0, 0].tolist() == [0.0, 1.0]
