# SPDX-License-Identifier: Apache-2.0
"""What a device offers, and how many programs share the keys of one request."""

from __future__ import annotations

import torch

MAX_SPLITS = 64
_MIN_KEYS = 128  # fewer keys per split cost more in the merge than they save
_GOOD_FIT = 0.95


def multiprocessors(device: torch.device) -> int:
    """Programs that run at once with one program per multiprocessor; 1 without a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory one program may use; without a GPU, the smallest of current GPUs."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 101376


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
