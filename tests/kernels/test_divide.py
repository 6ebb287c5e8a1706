# SPDX-License-Identifier: Apache-2.0
"""Dividing keys among programs: every key once, parts in order, and no request much longer at work than the others."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from dcp_compile.kernels.divide import MOST_CHUNKS, Division, divide
from dcp_compile.kernels.merge_pieces import merge_pieces
from dcp_compile.ops import merge

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEYS = 64


def divided(lengths: list[int], tiles: int, width: int, rows: int = 1) -> tuple[Division, list[list[int]]]:
    """The division, and the programs that have work; the last row of a request is the longest."""
    bounds = torch.tensor(lengths)[:, None] - torch.arange(rows - 1, -1, -1)
    division = divide(bounds.clamp_min(0).flatten().int().to(DEVICE), len(lengths), tiles, width, KEYS)
    return division, [entry for entry in division.programs.tolist() if entry[0] >= 0]


@pytest.mark.seeds(30)
def test_every_key_belongs_to_one_program(draw: random.Random) -> None:
    batch, tiles, width = draw.randint(1, 40), draw.randint(1, 20), draw.choice([5, 64, 132])
    lengths = [draw.choice([0, 1, 63, 64, 65, draw.randint(0, 3000), draw.randint(0, 200000)]) for _ in range(batch)]
    division, programs = divided(lengths, tiles, width, draw.choice([1, 3]))
    idle = [entry for entry in division.programs.tolist() if entry[0] < 0]
    assert programs + idle == division.programs.tolist(), "programs without work come last"
    parts = division.parts.tolist()
    assert sum(count for _, count in parts) == len(programs) <= division.most_parts
    used = [first + i for first, count in parts if count > 1 for i in range(count)]
    assert len(set(used)) == len(used) and max(used, default=0) < division.most_parts
    for request, length in enumerate(lengths):
        mine = sorted(entry[1:] for entry in programs if entry[0] == request)
        first, count = parts[request]
        assert len(mine) == count >= 1
        assert [entry[0] for entry in mine] == [0, *(entry[1] for entry in mine[:-1])]
        assert mine[-1][1] == -(-length // KEYS)
        assert [entry[2] for entry in mine] == ([-1] if count == 1 else list(range(first, first + count)))


@pytest.mark.parametrize(("lengths", "tiles", "chunks"), [
    ([32768] * 8, 2, {63}),  # eight chunks of 63 blocks each, and a small one
    ([8192] * 32, 12, {128}),  # 384 programs fill the device three times: nothing is split
    ([131072] + [64] * 7, 2, {32}),
    ([64] * 5, 2, {1}),
])  # fmt: skip
def test_chunks_suit_the_device(lengths: list[int], tiles: int, chunks: set[int]) -> None:
    _, programs = divided(lengths, tiles, 132)
    sizes = [last - first for _, first, last, _ in programs]
    assert {max(sizes)} == chunks


def test_a_long_request_among_short_ones_gets_most_of_the_device() -> None:
    _, programs = divided([64, 1, 100000, 700, 0], 2, 132)
    assert sum(request == 2 for request, *_ in programs) > MOST_CHUNKS * 0.9


@pytest.mark.seeds(4)
def test_parts_are_merged_and_single_pieces_left_alone(draw: random.Random) -> None:
    rows, heads, latent = draw.choice([1, 2]), draw.choice([1, 3]), draw.choice([16, 40])
    lengths = [draw.choice([0, 64, 700, 5000]) for _ in range(draw.randint(1, 5))] + [9000]
    division, _ = divided(lengths, 1, 8, rows)
    assert max(count for _, count in division.parts.tolist()) > 1
    outs = torch.randn(division.most_parts, rows, heads, latent)
    lses = torch.where(torch.rand(division.most_parts, rows, heads) < 0.2, -math.inf, torch.randn(1))
    outs[lses == -math.inf] = math.nan
    out, lse = torch.full((len(lengths) * rows, heads, latent), 7.0), torch.full((len(lengths) * rows, heads), 7.0)
    got, got_lse = out.to(DEVICE), lse.to(DEVICE)
    merge_pieces(outs.to(DEVICE), lses.to(DEVICE), division, got, got_lse)
    for request, (first, count) in enumerate(division.parts.tolist()):
        if count > 1:
            here: Tensor | slice = slice(request * rows, (request + 1) * rows)
            out[here], lse[here] = merge.merge_partials(outs[first : first + count], lses[first : first + count])
    torch.testing.assert_close(got.cpu(), out)
    torch.testing.assert_close(got_lse.cpu(), lse)
