# SPDX-License-Identifier: Apache-2.0
"""Free lists of KV pages and of recurrent-state slots.

Page ids are logical: one id names the same page in the pool of every layer and of every rank, and covers
``block_size * dcp_size`` consecutive positions of one request. Page 0 is the null page and is never handed out.
"""

from __future__ import annotations

import heapq
from collections import Counter

from ..errors import CapacityError
from ..layout import NULL_PAGE


class _FreeList:
    """Integers handed out lowest first."""

    what = "entry"
    remedy = ""

    def __init__(self, ids: range):
        self.total = len(ids)
        self._free = list(ids)  # a heap
        self._held: set[int] = set()

    @property
    def available(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` ids; CapacityError, with nothing taken, when fewer are free."""
        if count < 0:
            raise ValueError(f"{count} {self.what}s cannot be taken; the count must be at least 0")
        if count > len(self._free):
            raise CapacityError(
                f"{count} {self.what}s are needed but {len(self._free)} of {self.total} are free; {self.remedy}"
            )
        taken = [heapq.heappop(self._free) for _ in range(count)]
        self._held.update(taken)
        return taken

    def give_back(self, ids: list[int]) -> None:
        """Return ids that :meth:`take` handed out; ValueError, with nothing returned, for any others."""
        wrong = sorted(entry for entry, count in Counter(ids).items() if entry not in self._held or count > 1)
        if wrong:
            raise ValueError(f"{self.what}s {wrong} are not in use, or were returned twice at once")
        self._held.difference_update(ids)
        for entry in ids:
            heapq.heappush(self._free, entry)


class PagePool(_FreeList):
    """The pages of a KV cache."""

    what = "page"
    remedy = "raise max_seq_len or max_batch_size, or close another generation"

    def __init__(self, pages: int):
        """``pages`` counts the null page."""
        super().__init__(range(NULL_PAGE + 1, pages))


class SlotPool(_FreeList):
    """The state slots of recurrent layers."""

    what = "state slot"
    remedy = "raise max_batch_size, or close another generation"

    def __init__(self, slots: int):
        super().__init__(range(slots))
