# SPDX-License-Identifier: Apache-2.0
"""Metadata operators against plain loops over rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_compile.layout import PAD_SLOT
from tests.cases import Sharding, between, examples, generators, shardings, strided

dcp = torch.ops.dcp


def by_hand(positions, table, prefixes, sharding: Sharding, rank: int):
    """Bounds of causal rows and of blocks, requests, slots and prefix bounds, one token at a time."""
    run, size, block = sharding.interleave, sharding.dcp_size, sharding.block_size

    def stored(length: int) -> int:
        return sum(position // run % size == rank for position in range(length))

    bounds, blocks, requests, slots = [], [], [], []
    for request, row in enumerate(positions):
        for position in row:
            bounds.append(stored(position + 1))
            blocks.append(stored(max(row) + 1) if position >= 0 else 0)
            requests.append(request)
            column = position // (block * size)
            mine = position >= 0 and position // run % size == rank
            page = table[request][column] if mine and column < len(table[request]) else 0
            before = stored(position) - stored(column * block * size) if mine else 0
            slots.append(page * block + before if page else PAD_SLOT)
    return bounds, blocks, requests, slots, [stored(prefix) for prefix in prefixes]


@st.composite
def steps(draw: Callable):
    """Sharding, rank, positions ``[B, S]``, block table ``[B, columns]``, prefix lengths ``[B]``."""
    sharding, generator = draw(shardings(most_ranks=4)), draw(generators())
    batch, rows, columns = draw(st.integers(0, 3)), draw(st.integers(0, 5)), draw(st.integers(0, 3))
    last = columns * sharding.column
    positions = torch.full((batch, rows), -1)
    for request in range(batch):
        first = between(generator, 0, last + 2)  # some rows lie past the table
        count = between(generator, 0, rows)
        start = between(generator, 0, 1) * (rows - count)
        positions[request, start : start + count] = torch.arange(first, first + count)
    table = torch.randint(0, 9, (batch, columns), generator=generator, dtype=torch.int32)  # 0 is the null page
    prefixes = torch.randint(0, last + 1, (batch,), generator=generator)
    return sharding, draw(st.integers(0, sharding.dcp_size - 1)), positions, table, prefixes


@examples(120)
@given(step=steps(), spread=st.booleans())
def test_every_value_is_what_counting_gives(step, spread: bool) -> None:
    sharding, rank, positions, table, prefixes = step
    wanted = by_hand(positions.tolist(), table.tolist(), prefixes.tolist(), sharding, rank)
    if spread:
        positions, table, prefixes = strided(positions), strided(table), strided(prefixes)
    place = (rank, *sharding.deal)
    found = (
        dcp.row_bounds(positions, *place),
        dcp.block_bounds(positions, *place),
        dcp.row_requests(positions),
        dcp.cp_local_slot(positions, table, sharding.block_size, *place),
        dcp.prefix_bounds(prefixes, *place),
    )
    assert [list(value) for value in wanted] == [value.tolist() for value in found]
    assert [value.dtype for value in found] == [torch.int32, torch.int32, torch.int32, torch.int64, torch.int32]
    causal, block = found[:1] + found[2:], found[1:]
    for fused, separate in ((dcp.step_metadata, causal), (dcp.block_metadata, block)):
        for one, together in zip(separate, fused(positions, table, prefixes, sharding.block_size, *place)):
            assert torch.equal(one, together) and one.dtype == together.dtype
            assert one.is_contiguous() and together.is_contiguous()


def test_ragged_requests_keep_their_own_rows() -> None:
    """Query lengths 3, 1 and 4, padded to 4: no row may be counted to another request."""
    positions = torch.tensor([[7, 8, 9, -1], [4, -1, -1, -1], [0, 1, 2, 3]])
    assert dcp.row_requests(positions).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert dcp.row_bounds(positions, 0, 1, 1).tolist() == [8, 9, 10, 0, 5, 0, 0, 0, 1, 2, 3, 4]


def test_padded_rows_see_nothing_and_write_nothing_on_any_rank() -> None:
    positions, table = torch.full((2, 3), -1), torch.full((2, 4), 5, dtype=torch.int32)
    for rank in range(4):
        bounds, _, slots, _ = dcp.step_metadata(positions, table, torch.zeros(2, dtype=torch.int64), 4, rank, 4, 2)
        assert bounds.tolist() == [0] * 6
        assert slots.tolist() == [PAD_SLOT] * 6


def test_rows_of_one_block_are_localised_one_by_one() -> None:
    """Rows 7..9 on the second of two ranks, and a verify block of 8 behind 3 tokens on 16 ranks."""
    assert dcp.row_bounds(torch.tensor([[7, 8, 9]]), 1, 2, 1).tolist() == [4, 4, 5]
    assert dcp.row_bounds(torch.arange(3, 11)[None], 7, 16, 1).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_prefixes_of_a_shrunken_request_are_recomputed() -> None:
    """101 tokens, then 97 after four rejections, on the fifth of eight ranks."""
    assert dcp.prefix_bounds(torch.tensor([101, 97]), 4, 8, 1).tolist() == [13, 12]
