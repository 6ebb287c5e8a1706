# SPDX-License-Identifier: Apache-2.0
"""Reading and writing per-sequence state by state slot; slot -1 is a padded request."""

from __future__ import annotations

from torch import Tensor


def gather_slots(pool: Tensor, state_slots: Tensor) -> Tensor:
    """Entries ``[B, ...]`` of ``pool [N, ...]``; zeros for a padded request."""
    entries = pool[state_slots.clamp_min(0).long()]
    entries[state_slots < 0] = 0
    return entries


def commit_slots(pool: Tensor, state_slots: Tensor, entries: Tensor) -> None:
    """Store ``entries [B, ...]`` in place; those of padded requests are dropped."""
    keep = state_slots >= 0
    pool[state_slots[keep].long()] = entries[keep].to(pool.dtype)
