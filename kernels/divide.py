# SPDX-License-Identifier: Apache-2.0
"""Dividing the keys of several requests among the programs of one attention call, by lengths only the device knows.

Keys are counted in blocks. Every request is cut into whole chunks of one size and what is left of it; a request no longer
than a chunk stays in one piece. Whole chunks come first, so that smaller pieces fill the gaps they leave. The size is the
one of a few candidates that a rough model of the device likes best. Every program works this out for itself.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .splits import split_count

MOST_WAVES = 4  # of the device, that the whole chunks may fill
MOST_CHUNKS = 132  # more of them make more to merge than they save
# In blocks: what a program costs before its first block and after its last, and what splitting any request costs.
_START = gl.constexpr(4)
_MERGE = gl.constexpr(4)


def candidates(batch: int, tiles: int, capacity: int, width: int) -> tuple[tuple[int, ...], int]:
    """How many chunks there may be of all requests together, and into how many the longest may be divided evenly.

    Args:
        tiles: programs per piece. capacity: keys a request can have. width: programs the device runs at once.
    """
    counts = [min(max(wave * width // tiles, 1), MOST_CHUNKS) for wave in range(1, MOST_WAVES + 1)]
    return tuple(dict.fromkeys(counts)), split_count(tiles * batch, capacity, width)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _cost(blocks, chunk, most, TILES: gl.constexpr, WIDTH: gl.constexpr):
    """Time of all pieces in blocks: whole chunks in waves, the rest in the gaps of the last one if they fit."""
    whole = blocks // chunk
    left = blocks - whole * chunk
    small = gl.where(left > 0, left + _START, 0)
    pieces = gl.sum((left > 0).to(gl.int32), 0)
    long = chunk + _START
    large = TILES * gl.sum(whole, 0)
    waves = (large + WIDTH - 1) // WIDTH
    largest = gl.max(small, 0)
    room = (waves * WIDTH - large) * (long // gl.maximum(largest, 1))
    rest = gl.sum(small, 0)
    last = (largest + rest // gl.maximum(pieces, 1)) // 2  # what some program does while the others have ended
    spread = (large * long + TILES * rest) // WIDTH + last
    time = gl.where(TILES * pieces <= room, waves * long, spread)
    # Pieces of several sizes read keys less in step with one another.
    return time + gl.where(pieces > 0, time // 32, 0) + gl.where(chunk < most, _MERGE, 0)


@gluon.jit
def own_piece(
    bounds,
    batch,
    program,
    parts,
    writes_parts,
    ROWS: gl.constexpr,  # bounds of a request
    KEYS: gl.constexpr,  # in a block
    TILES: gl.constexpr,  # programs per piece
    WIDTH: gl.constexpr,  # programs the device runs at once
    COUNTS: gl.constexpr,
    EVEN: gl.constexpr,
    BLOCK_B: gl.constexpr,
    BLOCK_R: gl.constexpr,
    num_warps: gl.constexpr,
):
    """The piece of program number ``program``: request, first block, block after the last, part.

    The request is -1 if the program has nothing to do, the part -1 if the piece is all of its request: an empty request
    has such a piece too. ``parts [B, 2]`` int32 is written where ``writes_parts``: a request's first part, and their
    number.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, BLOCK_R], [32, 1], [num_warps, 1], [1, 0])
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    request = gl.arange(0, BLOCK_B, layout=gl.SliceLayout(1, layout))[:, None]
    row = gl.arange(0, BLOCK_R, layout=gl.SliceLayout(0, layout))[None, :]
    inside = (request < batch) & (row < ROWS)
    longest = gl.max(gl.load(bounds + request * ROWS + row, mask=inside, other=0), 1)
    blocks = gl.convert_layout((longest + KEYS - 1) // KEYS, vector)
    b = gl.arange(0, BLOCK_B, layout=vector)
    total = gl.sum(blocks, 0)
    most = gl.maximum(gl.max(blocks, 0), 1)

    chunk = most
    best = _cost(blocks, most, most, TILES, WIDTH)
    for i in gl.static_range(len(COUNTS) + 1):
        if i < len(COUNTS):
            other = gl.minimum(gl.maximum((total + COUNTS[i] - 1) // COUNTS[i], 2), most)
        else:
            other = (most + EVEN - 1) // EVEN
        cost = _cost(blocks, other, most, TILES, WIDTH)
        chunk = gl.where(cost < best, other, chunk)
        best = gl.minimum(cost, best)

    whole = blocks // chunk
    more = ((b < batch) & ((blocks > whole * chunk) | (blocks == 0))).to(gl.int32)
    pieces = whole + more
    if writes_parts:
        before = gl.associative_scan(pieces, 0, _add) - pieces
        gl.store(parts + 2 * b, before, mask=b < batch)
        gl.store(parts + 2 * b + 1, pieces, mask=b < batch)
    up_to = gl.associative_scan(whole, 0, _add)
    chunks = gl.sum(whole, 0)
    rank = program - chunks
    rest_up_to = gl.associative_scan(more, 0, _add)
    passed = gl.where(rank < 0, (up_to <= program).to(gl.int32), (rest_up_to <= rank).to(gl.int32))
    request = gl.sum(gl.where(b < batch, passed, 0), 0)
    mine = b == request
    own_whole = gl.sum(gl.where(mine, whole, 0), 0)
    index = gl.where(rank < 0, program - gl.sum(gl.where(b < request, whole, 0), 0), own_whole)
    last = gl.where(rank < 0, (index + 1) * chunk, gl.sum(gl.where(mine, blocks, 0), 0))
    part = gl.sum(gl.where(b < request, pieces, 0), 0) + index
    part = gl.where(gl.sum(gl.where(mine, pieces, 0), 0) > 1, part, -1)
    request = gl.where(rank < gl.sum(more, 0), request, -1)
    return request, index * chunk, last, part
