# SPDX-License-Identifier: Apache-2.0
"""Random inputs of the kernel tests: awkward strides, and NaN wherever a kernel must not look."""

from __future__ import annotations

import random

import torch
from torch import Tensor


def strided(tensor: Tensor, draw: random.Random) -> Tensor:
    """The same values behind other strides: as they are, sliced out of something larger, or transposed in memory.

    To be called on the device: a copy from one device to another makes slices dense.
    """
    kind = draw.choice(["plain", "sliced", "transposed"])
    if kind == "plain" or tensor.dim() == 0:
        return tensor
    if kind == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    around = float("nan") if tensor.is_floating_point() else -77
    larger = [size + draw.randint(1, 3) for size in tensor.shape]
    wide = torch.full(larger, around, dtype=tensor.dtype, device=tensor.device)
    window = wide[tuple(slice(1, size + 1) for size in tensor.shape)]
    window.copy_(tensor)
    return window


def step_positions(draw: random.Random, batch: int, rows: int, longest: int) -> Tensor:
    """Positions ``[B, S]`` int64: consecutive, padded before the first token or after the last, or altogether."""
    positions = torch.full((batch, rows), -1)
    for request in range(batch):
        kind = draw.choice(["full", "left", "right", "empty"])
        padding = {"full": 0, "empty": rows}.get(kind, draw.randint(0, rows))
        first = 0 if kind == "left" else draw.randint(0, max(longest - rows, 0))
        valid = torch.arange(first, first + rows - padding)
        start = padding if kind == "left" else 0
        positions[request, start : start + len(valid)] = valid
    return positions


def shuffled_tables(draw: random.Random, columns: list[int], width: int) -> tuple[Tensor, int]:
    """Block table ``[B, width]`` int32 with ``columns[b]`` pages of request b in random order, 0 after them.

    Returns the table and the number of pages, the null page and a few unused ones included.
    """
    pages = list(range(1, sum(columns) + 1 + draw.randint(0, 3)))
    total = len(pages) + 1
    draw.shuffle(pages)
    table = torch.zeros(len(columns), width, dtype=torch.int32)
    for request, count in enumerate(columns):
        for column in range(count):
            table[request, column] = pages.pop()
    return table, total
