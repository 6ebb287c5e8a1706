# SPDX-License-Identifier: Apache-2.0
"""Dividing keys among programs, in the model of Gluon: every key once, parts in order, and pieces that suit the device.

On a GPU the same code runs inside the Hopper kernel only; its tests are in test_mla_hopper.py.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
import triton
from simulated_gluon import Pointer, load_simulated

from dcp_compile.kernels.divide import limits
from dcp_compile.kernels.merge_pieces import merge_pieces
from dcp_compile.ops import merge

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEYS = 64
divide = load_simulated(Path(__file__).parents[2] / "kernels" / "divide.py", "dcp_compile.kernels")


def divided(lengths: list[int], tiles: int, width: int, rows: int = 1) -> tuple[list[list[int]], list[list[int]]]:
    """What each program has to do, and the parts of each request; the last row of a request is the longest."""
    bounds = (torch.tensor(lengths)[:, None] - torch.arange(rows - 1, -1, -1)).clamp_min(0).flatten().int()
    batch = len(lengths)
    most, even = limits(batch, tiles, 1 << 20, width)
    parts = torch.full((batch, 2), -7, dtype=torch.int32)
    power = triton.next_power_of_2
    division = divide.divide(
        Pointer(bounds), batch, most, even, rows, KEYS, tiles, width, power(batch), power(rows), 4
    )  # fmt: skip
    count = int((division[1] + division[2]).sum())
    assert count <= most + batch
    pieces = [
        divide.own_piece(*division, batch, program, Pointer(parts), program == 0, power(batch), 4)
        for program in range(count)
    ]
    return [[int(value) for value in piece] for piece in pieces], parts.tolist()


@pytest.mark.seeds(10)
def test_every_key_belongs_to_one_program(draw: random.Random) -> None:
    batch, tiles, width = draw.choice([1, 2, 40, 300]) + draw.randint(0, 5), draw.randint(1, 20), draw.choice([5, 64, 132])
    lengths = [draw.choice([0, 1, 63, 64, 65, draw.randint(0, 3000), draw.randint(0, 200000)]) for _ in range(batch)]
    programs, parts = divided(lengths, tiles, width, draw.choice([1, 3]))
    assert sum(count for _, count in parts) == len(programs)
    used = [first + i for first, count in parts if count > 1 for i in range(count)]
    assert len(set(used)) == len(used) and max(used, default=0) < len(programs)
    for request, length in enumerate(lengths):
        mine = sorted(piece[1:] for piece in programs if piece[0] == request)
        first, count = parts[request]
        assert len(mine) == count >= 1
        assert [piece[0] for piece in mine] == [0, *(piece[1] for piece in mine[:-1])]
        assert mine[-1][1] == -(-length // KEYS)
        assert [piece[2] for piece in mine] == ([-1] if count == 1 else list(range(first, first + count)))


def makespan(pieces: list[list[int]], tiles: int, width: int, start: int = 4) -> int:
    """When the last program ends, in blocks, if each is taken up in turn by the multiprocessor that is free first."""
    free = [0] * width
    for _, first, last, _ in pieces:
        for _ in range(tiles):
            at = min(range(width), key=free.__getitem__)
            free[at] += last - first + start
    return max(free)


@pytest.mark.parametrize(("batch", "tiles"), [(20, 1), (27, 1), (60, 2), (100, 1), (140, 1)])
def test_no_more_pieces_than_programs(batch: int, tiles: int) -> None:
    """Equal requests of many keys, which fill the device best in more waves than there are programs for."""
    programs, parts = divided([200_000] * batch, tiles, 132)
    assert sum(count for _, count in parts) == len(programs) <= limits(batch, tiles, 1 << 20, 132)[0] + batch


@pytest.mark.seeds(8)
def test_long_pieces_start_first(draw: random.Random) -> None:
    """Whole chunks, then the others by quarters of a chunk; in each quarter by request."""
    lengths = [draw.choice([0, draw.randint(0, 4000), draw.randint(0, 100_000)]) for _ in range(draw.randint(1, 40))]
    programs, _ = divided([1, *lengths], draw.choice([1, 2, 12]), 132)
    chunk = max(last - first for _, first, last, _ in programs)
    classes = [((last - first) * 4 // chunk, request) for request, first, last, _ in programs]
    assert classes == sorted(classes, key=lambda entry: (-entry[0], entry[1]))


@pytest.mark.parametrize(("rows", "most"), [(1, 14), (8, 67)])
def test_short_requests_fill_the_gaps(rows: int, most: int) -> None:
    """Some shorter requests beside a long one: 11 and 62 blocks of work for each multiprocessor."""
    programs, _ = divided([32768, 4096, 1, 700, 2048, 64, 3333, 129], math.ceil(rows * 96 / 64), 132, rows)
    assert makespan(programs, math.ceil(rows * 96 / 64), 132, start=3) <= most


@pytest.mark.parametrize(("lengths", "tiles", "end"), [
    ([8192, 128, 64], 2, 5), ([16384, 512, 8192], 1, 6), ([4096, 2048, 3072, 128, 3072], 2, 6), ([8192, 2048, 2048, 64], 2, 6),
])  # fmt: skip
def test_the_best_size_is_chosen(lengths: list[int], tiles: int, end: int) -> None:
    programs, _ = divided(lengths, tiles, 132)
    assert makespan(programs, tiles, 132, start=3) == end


@pytest.mark.seeds(8)
def test_the_device_is_kept_busy(draw: random.Random) -> None:
    """Even batches and ones with a long request take at most half more than their share of the work."""
    tiles, width, batch = draw.choice([1, 2, 5, 12]), 132, draw.randint(1, 20)
    longest = draw.choice([20_000, 100_000, 500_000])
    short = longest if draw.random() < 0.5 else draw.randint(0, 500)
    lengths = [longest, *(draw.randint(short // 2, short) for _ in range(batch - 1))]
    programs, _ = divided(lengths, tiles, width)
    ideal = tiles * sum(-(-length // KEYS) for length in lengths) / width
    assert makespan(programs, tiles, width) < 1.5 * ideal + 16


@pytest.mark.parametrize(("lengths", "tiles", "sizes"), [
    ([32768] * 8, 12, {128}),  # 384 programs of four chunks fill the device three times
    ([8192] * 32, 2, {64}),
    ([64] * 5, 2, {1}),
    ([700] * 100, 2, {11}),  # enough programs: nothing is split
])  # fmt: skip
def test_equal_requests_are_divided_evenly(lengths: list[int], tiles: int, sizes: set[int]) -> None:
    programs, _ = divided(lengths, tiles, 132)
    assert {last - first for _, first, last, _ in programs} == sizes


@pytest.mark.seeds(4)
def test_parts_are_merged_and_single_pieces_left_alone(draw: random.Random) -> None:
    rows, heads, latent = draw.choice([1, 2]), draw.choice([1, 3]), draw.choice([16, 40])
    counts = [draw.choice([1, 2, 5, 40]) for _ in range(draw.randint(1, 5))] + [3]
    parts = torch.tensor([[sum(counts[:request]), count] for request, count in enumerate(counts)], dtype=torch.int32)
    outs = torch.randn(sum(counts), rows, heads, latent)
    lses = torch.where(torch.rand(sum(counts), rows, heads) < 0.2, -math.inf, torch.randn(sum(counts), rows, heads))
    outs[lses == -math.inf] = math.nan
    out, lse = torch.full((len(counts) * rows, heads, latent), 7.0), torch.full((len(counts) * rows, heads), 7.0)
    got, got_lse = out.to(DEVICE), lse.to(DEVICE)
    merge_pieces(outs.to(DEVICE), lses.to(DEVICE), parts.to(DEVICE), got, got_lse)
    for request, (first, count) in enumerate(parts.tolist()):
        if count > 1:
            here = slice(request * rows, (request + 1) * rows)
            out[here], lse[here] = merge.merge_partials(outs[first : first + count], lses[first : first + count])
    torch.testing.assert_close(got.cpu(), out)
    torch.testing.assert_close(got_lse.cpu(), lse)
