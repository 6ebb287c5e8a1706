# SPDX-License-Identifier: Apache-2.0
"""Free lists of pages and state slots."""

from __future__ import annotations

import time

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dcp_compile.cache import PagePool, SlotPool
from dcp_compile.errors import CapacityError
from dcp_compile.layout import NULL_PAGE
from tests.cases import examples


def test_the_null_page_is_never_handed_out() -> None:
    pool = PagePool(5)
    assert pool.total == pool.available == 4
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    assert NULL_PAGE not in [1, 2, 3, 4]


def test_state_slots_start_at_zero() -> None:
    assert sorted(SlotPool(3).take(3)) == [0, 1, 2]


@pytest.mark.parametrize("pool", [PagePool(1), PagePool(0), SlotPool(0)])
def test_empty_pools(pool: PagePool | SlotPool) -> None:
    assert pool.total == 0 and pool.take(0) == []
    with pytest.raises(CapacityError, match="of 0 are free"):
        pool.take(1)


def test_too_much_is_refused_whole() -> None:
    pool = PagePool(4)
    pool.take(1)
    with pytest.raises(CapacityError, match="3 pages are needed but 2 of 3 are free; raise max_seq_len"):
        pool.take(3)
    assert pool.available == 2
    with pytest.raises(CapacityError, match="2 state slots are needed but 1 of 1 are free; raise max_batch_size"):
        SlotPool(1).take(2)


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        PagePool(4).take(-1)


@pytest.mark.parametrize("ids, named", [([1, 1], "1"), ([3], "3"), ([0], "0"), ([9], "9"), ([-1], "-1")])
def test_only_what_was_taken_can_come_back(ids: list[int], named: str) -> None:
    """Returned twice, never taken, the null page, out of range."""
    pool = PagePool(4)
    assert pool.take(2) == [1, 2]
    with pytest.raises(ValueError, match=named):
        pool.give_back(ids)
    assert pool.available == 1 and pool.take(1) == [3]


def test_a_large_pool_takes_back_as_fast_as_it_hands_out() -> None:
    """A million tokens for each of eight requests, in pages of 64: looking each page up in a list takes minutes."""
    pool = PagePool(2**17 + 1)
    ids = pool.take(2**17)
    started = time.process_time()
    pool.give_back(ids)
    assert time.process_time() - started < 5 and pool.available == 2**17


class Pools(RuleBasedStateMachine):
    """Random use of a pool against a set of free ids."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(9)
        self.free = set(range(1, 9))
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, 10))
    def take(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(CapacityError):
                self.pool.take(count)
            return
        taken = self.pool.take(count)
        assert taken == sorted(self.free)[:count]  # lowest first: equal on all ranks
        self.free -= set(taken)
        self.held.append(taken)

    @rule(data=st.data())
    def give_back(self, data) -> None:
        if self.held:
            ids = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.pool.give_back(ids)
            self.free |= set(ids)

    @invariant()
    def count(self) -> None:
        assert self.pool.available == len(self.free)


TestPools = Pools.TestCase
TestPools.settings = examples(30)
