# SPDX-License-Identifier: Apache-2.0
"""Dividing the keys of several requests among the programs of one attention call, by lengths only the device knows.

Keys are counted in blocks. Every request is cut into whole chunks of one size, and what is left of it; a request that is
not longer than a chunk stays in one piece. Programs with whole chunks come first, so that the small ones fill the gaps
they leave.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_WAVES = 4  # of the device, that the whole chunks may fill
MOST_CHUNKS = 66  # more chunks make more to merge than they save
_START = tl.constexpr(4)  # what a program costs before its first block and after its last, in blocks
_MERGE = tl.constexpr(4)  # what splitting any request costs, in blocks
_WORST = tl.constexpr(2**31 - 1)


@dataclass(frozen=True)
class Division:
    """Attributes:
    programs: ``[N, 4]`` int32: request, first block, block after the last, part; -1 as request where a program has
        nothing to do, -1 as part where it has all keys of its request.
    parts: ``[B, 2]`` int32: a request's first part, and their number.
    most_parts: of all requests together.
    """

    programs: Tensor
    parts: Tensor
    most_parts: int


@triton.jit
def _divide(
    bounds,
    programs,
    parts,
    batch,
    total_programs,
    bound_stride,
    ROWS: tl.constexpr,  # bounds of a request
    KEYS: tl.constexpr,  # in a block
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNTS: tl.constexpr,
    MOST: tl.constexpr,  # chunks of a request
    BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRIDE: tl.constexpr,  # chunks of a request listed at once
):
    """One program. The size of a chunk is the one of a few candidates that a rough model of the device likes best: one
    that gives any of ``COUNTS`` chunks, each ``TILES`` programs of which ``WIDTH`` run at once, or no splitting at all."""
    b = tl.arange(0, BLOCK_B)
    r = tl.arange(0, BLOCK_R)
    here = b < batch
    inside = here[:, None] & (r < ROWS)[None, :]
    longest = tl.max(tl.load(bounds + (b[:, None] * ROWS + r[None, :]) * bound_stride, mask=inside, other=0), 1)
    blocks = (longest + KEYS - 1) // KEYS
    total = tl.sum(blocks, 0)
    most = tl.maximum(tl.max(blocks, 0), 1)

    best = _WORST
    chosen = most
    for wave in tl.static_range(len(COUNTS) + 1):
        chunk = most
        if wave > 0:
            chunk = tl.minimum(tl.maximum((total + COUNTS[wave - 1] - 1) // COUNTS[wave - 1], 2), most)
        whole = blocks // chunk
        left = blocks - whole * chunk
        large = TILES * tl.sum(whole, 0)
        small = TILES * tl.sum(tl.where(left > 0, left + _START, 0), 0)
        largest = tl.max(tl.where(left > 0, left + _START, 0), 0)
        waves = (large + WIDTH - 1) // WIDTH
        gaps = (waves * WIDTH - large) * (chunk + _START)
        filled = tl.maximum(waves * (chunk + _START), largest)
        spread = (large * (chunk + _START) + small) // WIDTH + largest // 2
        cost = tl.where(small <= gaps, filled, spread) + tl.where(chunk < most, _MERGE, 0)
        chosen = tl.where(cost < best, chunk, chosen)
        best = tl.minimum(cost, best)

    whole = blocks // chosen
    left = blocks - whole * chosen
    more = here & ((left > 0) | (blocks == 0))  # an empty request has a program too: it writes zeros
    pieces = whole + more.to(tl.int32)
    part = tl.cumsum(pieces, 0) - pieces
    tl.store(parts + 2 * b, part, mask=here)
    tl.store(parts + 2 * b + 1, pieces, mask=here)
    part = tl.where(pieces > 1, part, -1)

    n = tl.arange(0, BLOCK_N)
    tl.store(programs + 4 * n, tl.full([BLOCK_N], -1, tl.int32), mask=n < total_programs)
    tl.debug_barrier()  # every program is idle before some are given work
    first = tl.cumsum(whole, 0) - whole
    zeros = tl.zeros([BLOCK_B, STRIDE], tl.int32)
    for start in range(0, MOST, STRIDE):
        piece = start + tl.arange(0, STRIDE)[None, :] + zeros
        entry = programs + 4 * (first[:, None] + piece)
        listed = piece < whole[:, None]
        tl.store(entry, b[:, None] + zeros, mask=listed)
        tl.store(entry + 1, piece * chosen, mask=listed)
        tl.store(entry + 2, (piece + 1) * chosen, mask=listed)
        tl.store(entry + 3, tl.where(part[:, None] < 0, -1, part[:, None] + piece), mask=listed)
    rank = tl.sum(whole, 0) + tl.cumsum(more.to(tl.int32), 0) - 1
    entry = programs + 4 * rank
    tl.store(entry, b, mask=more)
    tl.store(entry + 1, whole * chosen, mask=more)
    tl.store(entry + 2, blocks, mask=more)
    tl.store(entry + 3, tl.where(part < 0, -1, part + whole), mask=more)


def divide(bounds: Tensor, batch: int, tiles: int, width: int, keys: int) -> Division:
    """Divide the keys of ``batch`` requests.

    Args:
        bounds: ``[B * rows]`` int32, keys that the rows of each request see; the longest row of a request counts.
        tiles: programs per piece. width: programs the device runs at once. keys: in a block.
    """
    counts = [max(wave * width // tiles, 1) for wave in range(1, MOST_WAVES + 1)]
    counts = tuple(dict.fromkeys(min(count, MOST_CHUNKS) for count in counts))
    count = max(counts) + batch
    programs = bounds.new_empty((count, 4))
    parts = bounds.new_empty((batch, 2))
    rows = len(bounds) // batch
    _divide[(1,)](
        bounds,
        programs,
        parts,
        batch,
        count,
        bounds.stride(0),
        ROWS=rows,
        KEYS=keys,
        TILES=tiles,
        WIDTH=width,
        COUNTS=counts,
        MOST=max(counts),
        BLOCK_B=triton.next_power_of_2(batch),
        BLOCK_R=triton.next_power_of_2(rows),
        BLOCK_N=triton.next_power_of_2(count),
        STRIDE=max(128 // triton.next_power_of_2(batch), 1),
        num_warps=1 if batch <= 32 else 4,
    )
    return Division(programs, parts, count)
