# SPDX-License-Identifier: Apache-2.0
"""Free lists of KV pages and of recurrent-state slots.

Page ids are logical: one id names the same page in the pool of every layer and of every rank, and covers
``block_size * dcp_size`` consecutive positions of one request. Page 0 is the null page and is never handed out.
"""

from __future__ import annotations

from ..errors import CapacityError
from ..layout import NULL_PAGE


class _FreeList:
    """Integers handed out lowest first."""

    what = "entry"
    remedy = ""

    def __init__(self, ids: range):
        self.total = len(ids)
        self._ids = ids
        self._free = sorted(ids, reverse=True)

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
        return [self._free.pop() for _ in range(count)]

    def give_back(self, ids: list[int]) -> None:
        """Return ids that :meth:`take` handed out; ValueError, with nothing returned, for any others."""
        held = set(self._ids) - set(self._free)
        wrong = sorted({entry for entry in ids if entry not in held or ids.count(entry) > 1})
        if wrong:
            raise ValueError(f"{self.what}s {wrong} are not in use, or were returned twice at once")
        self._free = sorted({*self._free, *ids}, reverse=True)


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
