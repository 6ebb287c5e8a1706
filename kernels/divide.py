# SPDX-License-Identifier: Apache-2.0
"""Dividing the keys of several requests among the programs of one attention call, by lengths only the device knows.

Keys are counted in blocks. Every request is cut into whole chunks of one size and what is left of it; a request no longer
than a chunk stays in one piece. Whole chunks come first, then smaller pieces by quarters of a chunk, the longest first, so
that each fills the gaps before it leaves. The size is the one, of a few candidates, that a rough model of the device likes
best. Every program works this out for itself.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .splits import split_count

MOST_WAVES = 3  # of the device, that the whole chunks may fill; programs without a piece take time, too
MOST_CHUNKS = 132  # more of them, or three per request, make more to merge than they save
# In blocks: what a program costs before its first block and after its last, and what splitting any request costs.
_START = gl.constexpr(3.0)
_MERGE = gl.constexpr(2.0)


def limits(batch: int, tiles: int, capacity: int, width: int) -> tuple[int, int]:
    """How many whole chunks there may be of all requests together, and into how many the longest may be divided evenly.

    Args:
        tiles: programs per piece. capacity: keys a request can have. width: programs the device runs at once.
    """
    most = min(max(MOST_WAVES * width // tiles, 1), max(MOST_CHUNKS, 3 * batch))
    return most, split_count(tiles * batch, capacity, width)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _cost(blocks, inside, chunk, longest, programs, TILES: gl.constexpr, WIDTH: gl.constexpr):
    """Time of all pieces, in blocks, for every candidate: ``blocks`` is ``[1, requests]``, ``chunk`` ``[candidates, 1]``.

    Whole chunks run in waves. What is left goes where the last of them leaves room if it fits there, and else makes all
    end at the same time; by how much programs miss that (a quarter of the mean piece, an eighth of the largest) was fitted
    to a simulation: for random lengths beside one of 4096 to 131072 keys the choice takes 0.7 % longer than the best
    candidate, in one case of twenty 4 %.
    """
    whole = blocks // chunk
    left = blocks - whole * chunk
    more = inside & ((left > 0) | (blocks == 0))
    small = gl.where(more, left + _START, 0.0)
    chunk = gl.max(chunk, 1)
    chunks = gl.sum(whole, 1)
    large = TILES * chunks
    waves = (large + WIDTH - 1) // WIDTH
    free = waves * WIDTH - large
    long = chunk + _START
    end = waves * long
    begin = gl.maximum(waves - 1, 0) * long
    pieces = gl.sum(more.to(gl.int32), 1)
    rest = gl.sum(small, 1)
    largest = gl.max(small, 1)
    mean = rest / gl.maximum(pieces, 1)
    in_gaps = begin + gl.maximum(TILES * rest / gl.maximum(free, 1) + mean / 4, largest)
    level = (large * long + TILES * rest) / WIDTH + mean / 4 + largest / 8
    spread = gl.maximum(level, begin + largest)
    time = gl.maximum(end, gl.where(TILES * rest <= free * long, in_gaps, spread))
    # Pieces of several sizes read keys less in step with one another.
    time += gl.where(pieces > 0, time / 32, 0.0) + gl.where(chunk < longest, _MERGE, 0.0)
    return gl.where(chunks + pieces > programs, float("inf"), time)


@gluon.jit
def divide(
    bounds,
    batch,
    most,  # whole chunks there may be
    even,  # parts the longest request may be divided into
    ROWS: gl.constexpr,  # bounds of a request
    KEYS: gl.constexpr,  # in a block
    TILES: gl.constexpr,  # programs per piece
    WIDTH: gl.constexpr,  # programs the device runs at once
    BLOCK_B: gl.constexpr,
    BLOCK_R: gl.constexpr,
    num_warps: gl.constexpr,
):
    """The division, over requests: blocks, whole chunks, whether there is a piece besides these; and the size of a chunk.

    An empty request has one piece.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, BLOCK_R], [32, 1], [num_warps, 1], [1, 0])
    request = gl.arange(0, BLOCK_B, layout=gl.SliceLayout(1, layout))[:, None]
    row = gl.arange(0, BLOCK_R, layout=gl.SliceLayout(0, layout))[None, :]
    inside = (request < batch) & (row < ROWS)
    keys = gl.max(gl.load(bounds + request * ROWS + row, mask=inside, other=0), 1)
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    blocks = gl.convert_layout((keys + KEYS - 1) // KEYS, vector)
    total = gl.sum(blocks, 0)
    longest = gl.maximum(gl.max(blocks, 0), 1)

    # What is worked out for every candidate and request has to fit into registers.
    candidates: gl.constexpr = 64 if BLOCK_B <= 128 else 8192 // BLOCK_B if BLOCK_B <= 2048 else 4
    lanes: gl.constexpr = 4 if BLOCK_B <= 32 else 32
    square: gl.constexpr = gl.BlockedLayout([1, 1], [32 // lanes, lanes], [num_warps, 1], [1, 0])
    candidate = gl.arange(0, candidates, layout=gl.SliceLayout(1, square))
    count = (candidate + 1) * most  # in units of 1 / (candidates - 2)
    chunk = gl.minimum(gl.maximum((total * (candidates - 2) + count - 1) // count, 2), longest)
    chunk = gl.where(candidate == candidates - 2, (longest + even - 1) // even, chunk)
    chunk = gl.where(candidate == candidates - 1, longest, chunk)
    columns: gl.constexpr = gl.SliceLayout(0, square)
    there = (gl.arange(0, BLOCK_B, layout=columns) < batch)[None, :]
    line = gl.convert_layout(blocks, columns)[None, :]
    cost = _cost(line, there, chunk[:, None], longest, most + batch, TILES, WIDTH)
    chunk = gl.max(gl.where(cost == gl.min(cost, 0), chunk, 0), 0)

    b = gl.arange(0, BLOCK_B, layout=vector)
    whole = blocks // chunk
    more = ((b < batch) & ((blocks > whole * chunk) | (blocks == 0))).to(gl.int32)
    return blocks, whole, more, chunk


@gluon.jit
def own_piece(
    blocks, whole, more, chunk, batch, program, parts, writes_parts, BLOCK_B: gl.constexpr, num_warps: gl.constexpr
):
    """The piece of program number ``program`` of a division: request, first block, block after the last, part.

    There are as many pieces as ``whole`` and ``more`` sum up to. The part is -1 if the piece is all of its request.
    ``parts [B, 2]`` int32 is written where ``writes_parts``: a request's first part, and their number.
    """
    b = gl.arange(0, BLOCK_B, layout=gl.BlockedLayout([1], [32], [num_warps], [0]))
    pieces = whole + more
    if writes_parts:
        before = gl.associative_scan(pieces, 0, _add) - pieces
        gl.store(parts + 2 * b, before, mask=b < batch)
        gl.store(parts + 2 * b + 1, pieces, mask=b < batch)
    up_to = gl.associative_scan(whole, 0, _add)
    # The other pieces are in four classes by length, each with a counter of 16 bits in one number: a grid has no more pieces.
    shift = 16 * (3 - (blocks - whole * chunk) * 4 // chunk)
    counts = more.to(gl.int64) << shift.to(gl.int64)
    rest_up_to = gl.associative_scan(counts, 0, _add)
    counts = gl.sum(counts, 0)
    place = program - gl.sum(whole, 0)  # among the pieces of its class, in the end; negative for a whole chunk
    for _ in gl.static_range(3):
        there = (counts & 0xFFFF).to(gl.int32)
        passed = place >= there
        place = gl.where(passed, place - there, place)
        counts = gl.where(passed, counts >> 16, counts)
        rest_up_to = gl.where(passed, rest_up_to >> 16, rest_up_to)
    rest_up_to = (rest_up_to & 0xFFFF).to(gl.int32)
    passed = gl.where(place < 0, (up_to <= program).to(gl.int32), (rest_up_to <= place).to(gl.int32))
    request = gl.sum(gl.where(b < batch, passed, 0), 0)
    mine = b == request
    own_whole = gl.sum(gl.where(mine, whole, 0), 0)
    index = gl.where(place < 0, program - gl.sum(gl.where(b < request, whole, 0), 0), own_whole)
    last = gl.where(place < 0, (index + 1) * chunk, gl.sum(gl.where(mine, blocks, 0), 0))
    part = gl.sum(gl.where(b < request, pieces, 0), 0) + index
    part = gl.where(gl.sum(gl.where(mine, pieces, 0), 0) > 1, part, -1)
    return request, index * chunk, last, part
