# SPDX-License-Identifier: Apache-2.0
"""How many programs share the keys of one request."""

from __future__ import annotations

MAX_SPLITS = 128
_MIN_KEYS = 128  # fewer keys per split cost more in the merge than they save
_GOOD_FIT = 0.95


def split_count(tiles: int, capacity: int, width: int) -> int:
    """Splits of the keys for ``tiles`` row tiles on a device that runs ``width`` programs at once.

    Lengths are known to the device only, so the choice rests on shapes: the smallest count whose last wave of programs
    is well filled, or else the best filled one. ``capacity`` is the number of keys the block table can hold.
    """
    most = min(MAX_SPLITS, max(capacity // _MIN_KEYS, 1))

    def fill(splits: int) -> float:
        waves = -(-tiles * splits // width)
        return tiles * splits / (waves * width)

    for splits in range(1, most + 1):
        if fill(splits) >= _GOOD_FIT:
            return splits
    return max(range(1, most + 1), key=fill)
