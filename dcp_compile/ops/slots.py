# SPDX-License-Identifier: Apache-2.0
"""Reading and writing per-sequence state by state slot; slot -1 is a padded request."""

from __future__ import annotations

from torch import Tensor

from ..errors import CapacityError


def gather_slots(pool: Tensor, state_slots: Tensor) -> Tensor:
    """Entries ``[B, ...]`` of ``pool [N, ...]``; zeros for a padded request."""
    entries = pool[state_slots.clamp_min(0).long()]
    entries[state_slots < 0] = 0
    return entries


def commit_slots(pool: Tensor, state_slots: Tensor, entries: Tensor) -> None:
    """Store ``entries [B, ...]`` in place; those of padded requests are dropped."""
    keep = state_slots >= 0
    pool[state_slots[keep].long()] = entries[keep].to(pool.dtype)


def check_pending(rows: int, room: int) -> None:
    """CapacityError, before anything is written, if a verify step has more rows than may stay pending."""
    if rows > room:
        raise CapacityError(
            f"a verify step of {rows} rows per request does not fit: at most {room} may stay pending; "
            "raise num_speculative_tokens"
        )
