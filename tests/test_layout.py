# SPDX-License-Identifier: Apache-2.0
"""Token ownership against a simulation that deals the tokens one at a time."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_compile import layout
from dcp_compile.layout import PAD_SLOT
from tests.cases import Sharding, examples, generators, shardings


def deal(length: int, sharding: Sharding) -> list[tuple[int, int, int]]:
    """(rank, block-table column, row in its page) of every token, dealt one after another like cards."""
    dealt, rank, run = [], 0, 0
    held = [0] * sharding.dcp_size
    for position in range(length):
        column = position // sharding.column
        if position % sharding.column == 0:
            held = [0] * sharding.dcp_size
        dealt.append((rank, column, held[rank]))
        held[rank] += 1
        run += 1
        if run == sharding.interleave:
            rank, run = (rank + 1) % sharding.dcp_size, 0
    return dealt


SMALL = [
    Sharding(dcp_size, interleave, interleave * runs)
    for dcp_size, interleave, runs in itertools.product([1, 2, 3, 5], [1, 2, 3], [1, 3])
]


@pytest.mark.parametrize("sharding", SMALL, ids=lambda s: f"D{s.dcp_size}-I{s.interleave}-b{s.block_size}")
@pytest.mark.parametrize("kind", ["int", "int32", "int64"])
def test_everything_agrees_with_dealing_one_token_at_a_time(sharding: Sharding, kind: str) -> None:
    length = 2 * sharding.column + sharding.interleave
    dealt = deal(length, sharding)
    pages = [7, 3, 11]
    ranks = range(sharding.dcp_size)
    index_of, counts = [], [0] * sharding.dcp_size
    lengths_of = [list(counts)]
    for rank, _, _ in dealt:
        index_of.append(counts[rank])
        counts[rank] += 1
        lengths_of.append(list(counts))

    def over(function, values):
        """``function`` of every value, as ints or as one tensor."""
        if kind == "int":
            return [function(value) for value in values]
        found = function(torch.tensor(list(values), dtype=getattr(torch, kind)))
        assert found.dtype == getattr(torch, kind)
        return found.tolist()

    positions = range(length)
    assert over(lambda p: layout.owner(p, *sharding.deal), positions) == [rank for rank, _, _ in dealt]
    assert over(lambda p: layout.local_index(p, *sharding.deal), positions) == index_of
    for rank in ranks:
        wanted = [counts[rank] for counts in lengths_of]
        assert over(lambda n, rank=rank: layout.local_length(n, rank, *sharding.deal), range(length + 1)) == wanted
        table = pages if kind == "int" else torch.tensor(pages, dtype=torch.int32)
        place = (table, sharding.block_size, rank, *sharding.deal)
        wanted = [pages[column] * sharding.block_size + row if who == rank else PAD_SLOT for who, column, row in dealt]
        assert over(lambda p, place=place: layout.local_slot(p, *place), positions) == wanted


@examples(200)
@given(sharding=shardings(), length=st.integers(0, 10**12))
def test_ranks_share_out_exactly_the_tokens(sharding: Sharding, length: int) -> None:
    shares = [layout.local_length(length, rank, *sharding.deal) for rank in range(sharding.dcp_size)]
    assert sum(shares) == length
    assert max(shares) - min(shares) <= sharding.interleave
    assert sorted(shares, reverse=True) == shares  # earlier ranks are served first
    grown = [layout.local_length(length + 1, rank, *sharding.deal) for rank in range(sharding.dcp_size)]
    gained = [rank for rank in range(sharding.dcp_size) if grown[rank] != shares[rank]]
    assert gained == [layout.owner(length, *sharding.deal)]


@examples(200)
@given(sharding=shardings(), position=st.integers(0, 10**12))
def test_owner_and_local_index_tell_the_position(sharding: Sharding, position: int) -> None:
    rank, index = layout.owner(position, *sharding.deal), layout.local_index(position, *sharding.deal)
    span = sharding.dcp_size * sharding.interleave
    assert index // sharding.interleave * span + rank * sharding.interleave + index % sharding.interleave == position
    assert layout.local_length(position, rank, *sharding.deal) == index


@examples(100)
@given(sharding=shardings(), length=st.integers(0, 300), query_len=st.integers(0, 20), data=st.data())
def test_row_bounds_count_the_keys_up_to_each_row(sharding: Sharding, length: int, query_len: int, data) -> None:
    rank = data.draw(st.integers(0, sharding.dcp_size - 1))
    owners = [layout.owner(position, *sharding.deal) for position in range(length)]
    wanted = [owners[: max(length - back, 0)].count(rank) for back in reversed(range(query_len))]
    assert layout.row_bounds(length, query_len, rank, *sharding.deal) == wanted
    both = layout.row_bounds(torch.tensor([[length], [0]]), query_len, rank, *sharding.deal)
    assert both.shape == (2, 1, query_len)
    assert both.tolist() == [[wanted], [[0] * query_len]]


@examples(100)
@given(sharding=shardings(), columns=st.integers(0, 5), generator=generators())
def test_slots_of_requests_never_collide(sharding: Sharding, columns: int, generator: torch.Generator) -> None:
    pages = torch.randperm(2 * columns, generator=generator)[:, None].view(2, columns) + 1
    positions = torch.arange(-2, columns * sharding.column + 3).expand(2, -1)
    taken = []
    for rank in range(sharding.dcp_size):
        slots = layout.local_slot(positions, pages, sharding.block_size, rank, *sharding.deal)
        assert slots.shape == positions.shape
        used = slots[slots != PAD_SLOT]
        assert len(used.unique()) == used.numel()
        assert set((used // sharding.block_size).tolist()) == set(pages.flatten().tolist())
        taken.append(slots != PAD_SLOT)
    inside = (positions >= 0) & (positions < columns * sharding.column)
    assert torch.equal(torch.stack(taken).sum(dim=0), inside.long())  # stored once, by one rank


def test_slots_take_one_table_per_request_or_one_for_all() -> None:
    positions = torch.tensor([[0, 5], [9, 2]])
    tables = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    place = (2, 1, 2, 1)  # pages of two tokens, second of two ranks
    each = layout.local_slot(positions, tables, *place)
    assert each.tolist() == [[PAD_SLOT, 4], [12, PAD_SLOT]]
    shared = layout.local_slot(positions, tables[0], *place)
    assert shared.tolist() == [[PAD_SLOT, 4], [6, PAD_SLOT]]
    assert layout.local_slot(5, [1, 2, 3], *place) == 4
    assert isinstance(layout.local_slot(5, tables[0], *place), int)


@pytest.mark.parametrize("position", [-1, -64, 128, 10**9])
def test_positions_outside_the_table_have_no_slot(position: int) -> None:
    assert layout.local_slot(position, [5, 6], 64, 0, 1, 1) == PAD_SLOT
    assert layout.local_slot(torch.tensor([position]), torch.tensor([5, 6]), 64, 0, 1, 1).tolist() == [PAD_SLOT]
    assert layout.local_slot(position, [], 64, 0, 1, 1) == PAD_SLOT


def test_the_null_page_has_no_slot() -> None:
    assert layout.local_slot(70, [5, 0, 7], 64, 0, 1, 1) == PAD_SLOT
    assert layout.local_slot(140, [5, 0, 7], 64, 0, 1, 1) == 7 * 64 + 12


def test_slots_beyond_two_billion_fit() -> None:
    """Page ids are int32, slots are not."""
    table = torch.tensor([2**26], dtype=torch.int32)
    assert layout.local_slot(torch.tensor([63]), table, 64, 0, 1, 1).tolist() == [2**32 + 63]


def test_bounds_are_localised_row_by_row() -> None:
    """Localising the request's length and subtracting row offsets would give [3, 4, 5]."""
    assert layout.row_bounds(10, 3, rank=1, dcp_size=2, interleave=1) == [4, 4, 5]


def test_a_block_table_column_covers_all_ranks() -> None:
    """Position 70 lies in the second column of four ranks' pages of 16, not in the fifth."""
    slots = [layout.local_slot(70, [5, 9, 2, 7, 11], 16, rank, 4, 1) for rank in range(4)]
    assert slots == [PAD_SLOT, PAD_SLOT, 145, PAD_SLOT]


def test_a_rank_needs_pages_for_its_share_only() -> None:
    assert [layout.local_length(512, rank, 4, 1) for rank in range(4)] == [128] * 4
    assert layout.pages_needed(512, 64, 4) == 2


@pytest.mark.parametrize("length, pages", [(0, 0), (1, 1), (7, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_exact_multiples_take_no_extra_page(length: int, pages: int) -> None:
    assert layout.pages_needed(length, block_size=4, dcp_size=2) == pages


def test_a_length_of_exactly_one_column_fills_every_rank() -> None:
    """Two ranks, runs of a whole page of four: tokens 0-3 and 4-7, no empty rank and no padding."""
    assert [layout.owner(position, 2, 4) for position in range(8)] == [0] * 4 + [1] * 4
    assert [layout.local_length(8, rank, 2, 4) for rank in range(2)] == [4, 4]


def test_a_verify_block_may_straddle_owners() -> None:
    """Runs of 32 on 4 ranks, rows 30..37: ownership is by token, not by request."""
    assert [layout.owner(position, 4, 32) for position in range(30, 38)] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert layout.row_bounds(38, 8, 0, 4, 32) == [31, 32, 32, 32, 32, 32, 32, 32]
    assert layout.row_bounds(38, 8, 1, 4, 32) == [0, 0, 1, 2, 3, 4, 5, 6]


def test_rejected_tokens_shrink_the_global_length_first() -> None:
    """101 tokens on 8 ranks; taking 4 back in local space would leave 9."""
    assert layout.local_length(101, 4, 8, 1) == 13
    assert layout.local_length(97, 4, 8, 1) == 12


def test_early_rows_of_a_block_may_see_nothing_where_later_ones_do() -> None:
    """A prompt of 3 and a verify block of 8 on 16 ranks."""
    bounds = [layout.row_bounds(11, 8, rank, 16, 1) for rank in (2, 3, 7)]
    assert bounds == [[1] * 8, [1] * 8, [0, 0, 0, 0, 1, 1, 1, 1]]


def test_a_block_that_passes_the_longest_length_writes_only_inside() -> None:
    """1024 tokens in pages of 64; rows 1020..1027."""
    slots = layout.local_slot(torch.arange(1020, 1028), torch.arange(1, 17), 64, 0, 1, 1).tolist()
    assert slots == [16 * 64 + 60, 16 * 64 + 61, 16 * 64 + 62, 16 * 64 + 63] + [PAD_SLOT] * 4
