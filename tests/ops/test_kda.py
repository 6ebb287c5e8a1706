# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention against matrices that are updated one token and one head at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dcp_compile.errors import CapacityError
from dcp_compile.ops.kda import L2_EPS, committed_state
from tests.cases import between, examples, generators, normal, strided
from tests.ops.sequences import poisoned_rows, step_positions

dcp = torch.ops.dcp
SCALE = 0.37


def token(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, l2norm: bool) -> Tensor:
    """One token of one request and head: changes ``state [K, V]`` in place, returns o ``[V]``."""
    if l2norm:
        q = q / math.sqrt(float(q @ q) + L2_EPS)
        k = k / math.sqrt(float(k @ k) + L2_EPS)
    for row in range(len(g)):
        state[row] *= math.exp(float(g[row]))
    u = float(beta) * (v - state.T @ k)
    for row in range(len(k)):
        state[row] += float(k[row]) * u
    return state.T @ (SCALE * q)


class Rows:
    """Random inputs of B requests with S rows each."""

    def __init__(self, generator: torch.Generator, batch: int, rows: int, heads: int, key: int, value: int):
        self.q, self.k = normal(generator, batch, rows, heads, key), normal(generator, batch, rows, heads, key)
        self.v = normal(generator, batch, rows, heads, value)
        self.g = -normal(generator, batch, rows, heads, key).abs()
        self.beta = torch.sigmoid(normal(generator, batch, rows, heads))

    def operands(self, positions: Tensor) -> list[Tensor]:
        """``[T, 1, H, ..]`` each, NaN in padded rows."""
        return [poisoned_rows(x, positions).unsqueeze(1) for x in (self.q, self.k, self.v, self.g, self.beta)]

    def token(self, state: Tensor, request: int, row: int, l2norm: bool) -> Tensor:
        """All heads of one row; ``state [H, K, V]``."""
        inputs = [x[request, row] for x in (self.q, self.k, self.v, self.g, self.beta)]
        return torch.stack([token(state[head], *(x[head] for x in inputs), l2norm) for head in range(len(state))])


@examples(60)
@given(
    generator=generators(), batch=st.integers(0, 3), rows=st.integers(0, 4), l2norm=st.booleans(), spread=st.booleans()
)
def test_a_step_that_commits(generator, batch: int, rows: int, l2norm: bool, spread: bool) -> None:
    heads, key, value = (between(generator, 1, 4) for _ in range(3))
    pool = normal(generator, 5, heads, key, value)
    slots = torch.randperm(5, generator=generator)[:batch].int()
    slots = torch.where(torch.rand(batch, generator=generator) < 0.25, -1, slots)
    positions = step_positions(generator, batch, rows, [True] * batch)
    inputs = Rows(generator, batch, rows, heads, key, value)
    wanted_pool = pool.clone()
    wanted = torch.zeros(batch, rows, heads, value, dtype=torch.float64)
    for request, slot in enumerate(slots.tolist()):
        state = wanted_pool[slot] if slot >= 0 else torch.zeros(heads, key, value, dtype=torch.float64)
        for row in range(rows):
            if positions[request, row] >= 0:
                wanted[request, row] = inputs.token(state, request, row, l2norm)
    operands = inputs.operands(positions)
    if spread:
        operands, slots = [strided(x) for x in operands], strided(slots)
    found = dcp.kda(*operands, pool, slots, positions, SCALE, l2norm)
    assert found.is_contiguous()
    torch.testing.assert_close(found, wanted.flatten(0, 1).unsqueeze(1), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(pool, wanted_pool, rtol=1e-10, atol=1e-10)


def pending_pools(slots: int, most: int, heads: int, key: int, value: int, dtype=torch.float64) -> list[Tensor]:
    return [torch.full((slots, most, heads, dim), 7.0, dtype=dtype) for dim in (key, value, key)]


@examples(50)
@given(generator=generators(), batch=st.integers(1, 3), most=st.integers(1, 4), l2norm=st.booleans())
def test_rounds_of_verify_and_accept(generator, batch: int, most: int, l2norm: bool) -> None:
    """The state is that of the accepted tokens alone, fed one at a time; a rejected one leaves no trace."""
    heads, key, value = (between(generator, 1, 3) for _ in range(3))
    pool = normal(generator, batch + 1, heads, key, value)
    pending = pending_pools(batch + 1, most, heads, key, value)
    slots = torch.randperm(batch + 1, generator=generator)[:batch].int()
    slots[0] = -1 if batch > 1 and between(generator, 0, 1) else slots[0]
    states = {b: pool[slot].clone() for b, slot in enumerate(slots.tolist()) if slot >= 0}
    others = [slot for slot in range(batch + 1) if slot not in slots.tolist()]
    untouched = [x[others].clone() for x in (pool, *pending)]
    accepted, previous = torch.zeros(batch, dtype=torch.int32), None
    for _ in range(4):
        rows = between(generator, 0, most)
        counts = [between(generator, 0, rows) for _ in range(batch)]
        positions = torch.full((batch, rows), -1)
        for request, count in enumerate(counts):
            positions[request, :count] = torch.arange(count) + 3
        inputs = Rows(generator, batch, rows, heads, key, value)
        found = dcp.kda_verify(
            *inputs.operands(positions), pool, *pending, accepted, slots, positions, SCALE, l2norm
        ).unflatten(0, (batch, rows))
        for request, state in states.items():
            for row in range(int(accepted[request])):
                previous.token(state, request, row, l2norm)
            torch.testing.assert_close(pool[slots[request]], state, rtol=1e-10, atol=1e-10)
            trial = state.clone()
            for row in range(counts[request]):
                wanted = inputs.token(trial, request, row, l2norm)
                torch.testing.assert_close(found[request, row, 0], wanted, rtol=1e-10, atol=1e-10)
            assert (found[request, counts[request] :] == 0).all()
        previous = inputs
        accepted = torch.tensor([between(generator, 0, count) for count in counts], dtype=torch.int32)
    assert all(torch.equal(x[others], old) for x, old in zip((pool, *pending), untouched))


@pytest.mark.parametrize("accepted", range(5))
def test_accepting_m_tokens_equals_m_single_steps(accepted: int) -> None:
    generator = torch.Generator().manual_seed(4)
    inputs = Rows(generator, 1, 4, 2, 3, 5)
    pool, slots = normal(generator, 1, 2, 3, 5), torch.zeros(1, dtype=torch.int32)
    stepped, pending = pool.clone(), pending_pools(1, 4, 2, 3, 5)
    positions = torch.arange(4)[None]
    operands = inputs.operands(positions)
    dcp.kda_verify(*operands, pool, *pending, torch.tensor([0], dtype=torch.int32), slots, positions, SCALE, True)
    assert torch.equal(pool, stepped)  # a verify step writes no state
    for row in range(accepted):
        dcp.kda(*(x[row : row + 1] for x in operands), stepped, slots, positions[:, :1], SCALE, True)
    nothing = torch.zeros(1, 0, dtype=torch.int64)
    count = torch.tensor([accepted], dtype=torch.int32)
    dcp.kda_verify(*(x[:0] for x in operands), pool, *pending, count, slots, nothing, SCALE, True)
    torch.testing.assert_close(pool, stepped, rtol=1e-12, atol=1e-12)


def test_a_discarded_step_accepts_nothing() -> None:
    """0 and 3 accepted tokens in one step: no index of -1 for the first, none of its records used."""
    generator = torch.Generator().manual_seed(5)
    pool, pending = normal(generator, 4, 1, 2, 2), pending_pools(4, 4, 1, 2, 2)
    for records in pending:
        records[:3] = torch.nan
        records[3] = -normal(generator, 4, 1, 2).abs()
    before, (k, u, g) = pool.clone(), (records[3:].clone() for records in pending)
    slots, accepted = torch.tensor([1, 3], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    none = torch.zeros(2, 0, dtype=torch.int64)
    nothing = Rows(generator, 2, 0, 1, 2, 2).operands(none)
    dcp.kda_verify(*nothing, pool, *pending, accepted, slots, none, SCALE, True)
    assert torch.equal(pool[:3], before[:3])
    wanted = before[3, 0]
    for row in range(3):
        wanted = wanted * g[0, row, 0].exp()[:, None] + k[0, row, 0][:, None] * u[0, row, 0]
    torch.testing.assert_close(pool[3, 0], wanted, rtol=1e-12, atol=1e-12)


def test_fresh_records_may_hold_anything_beyond_the_accepted_ones() -> None:
    state, records = torch.ones(1, 1, 2, 2), torch.full((1, 3, 1, 2), torch.nan)
    records[:, 0] = 0.0
    found = committed_state(state, records, records, records, torch.tensor([1]))
    assert torch.equal(found, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_accumulate_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    inputs = Rows(generator, 2, 3, 2, 4, 4)
    positions, slots = torch.arange(3).expand(2, 3), torch.arange(2, dtype=torch.int32)
    operands = [x.to(dtype) for x in inputs.operands(positions)]
    pool, exact = torch.zeros(2, 2, 4, 4), torch.zeros(2, 2, 4, 4, dtype=torch.float64)
    wanted = dcp.kda(*(x.double() for x in operands), exact, slots, positions, SCALE, True)
    found = dcp.kda(*operands, pool, slots, positions, SCALE, True)
    assert found.dtype == dtype and pool.dtype == torch.float32
    torch.testing.assert_close(pool.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_a_zero_key_is_not_divided_by_zero() -> None:
    positions, slots = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    zero = torch.zeros(1, 1, 1, 2)
    pool = torch.ones(1, 1, 2, 2)
    out = dcp.kda(zero, zero, zero + 1, zero, torch.ones(1, 1, 1), pool, slots, positions, 1.0, True)
    assert torch.equal(out, torch.zeros_like(out)) and torch.equal(pool, torch.ones_like(pool))


def test_slots_may_be_a_column_of_a_table() -> None:
    table = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]], dtype=torch.int32) - 10
    generator = torch.Generator().manual_seed(7)
    inputs, positions = Rows(generator, 2, 1, 1, 2, 2), torch.zeros(2, 1, dtype=torch.int64)
    pools = [normal(torch.Generator().manual_seed(8), 14, 1, 2, 2) for _ in range(2)]
    out = [
        dcp.kda(*inputs.operands(positions), pool, slots, positions, SCALE, False)
        for pool, slots in zip(pools, (table[:, 2], table[:, 2].clone()))
    ]
    assert torch.equal(*out) and torch.equal(*pools)


def test_a_verify_step_has_room_for_as_many_rows_as_stay_pending() -> None:
    inputs = Rows(torch.Generator().manual_seed(0), 1, 3, 1, 2, 2)
    positions, slots = torch.arange(3)[None], torch.zeros(1, dtype=torch.int32)
    pool = torch.zeros(1, 1, 2, 2, dtype=torch.float64)
    with pytest.raises(CapacityError, match="3 rows per request does not fit: at most 2"):
        dcp.kda_verify(
            *inputs.operands(positions), pool, *pending_pools(1, 2, 1, 2, 2), slots, slots, positions, SCALE, True
        )
    assert (pool == 0).all()
