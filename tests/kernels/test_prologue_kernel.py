# SPDX-License-Identifier: Apache-2.0
"""step_metadata and block_metadata in one launch each, against the reference operators and the layout."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_inputs import step_positions, strided

from dcp_compile import layout
from dcp_compile.kernels.prologue import block_metadata, step_metadata
from dcp_compile.ops import metadata


def check(positions, table, prefix, block_size, rank, dcp_size, interleave, device, draw=random.Random(0)):
    moved = [strided(t.to(device), draw) for t in (positions, table, prefix)]
    got = step_metadata(*moved, block_size, rank, dcp_size, interleave)
    compare(got, metadata.step_metadata(positions, table, prefix, block_size, rank, dcp_size, interleave))
    block = block_metadata(*moved, block_size, rank, dcp_size, interleave)
    compare(block, metadata.block_metadata(positions, table, prefix, block_size, rank, dcp_size, interleave))
    return got


def compare(got, want):
    for name, mine, reference in zip(("bounds", "requests", "slots", "prefix_bounds"), got, want):
        assert mine.dtype == reference.dtype, name
        assert mine.tolist() == reference.tolist(), name


@pytest.mark.seeds(40)
def test_equals_reference(draw: random.Random, device: str) -> None:
    dcp_size = draw.choice([1, 2, 3, 4, 8, 16])
    block_size = draw.choice([1, 4, 16, 64])
    interleave = draw.choice([i for i in (1, 2, 4, 16, 64) if block_size % i == 0])
    batch, rows, columns = draw.choice([0, 1, 2, 5]), draw.choice([0, 1, 2, 8, 150]), draw.choice([1, 2, 7])
    capacity = columns * block_size * dcp_size
    positions = step_positions(draw, batch, rows, capacity + draw.choice([0, rows]))  # some lie past the table
    table = torch.tensor([[draw.choice([0, draw.randint(1, 999)]) for _ in range(columns)] for _ in range(batch)])
    table = table.reshape(batch, columns).int()
    prefix = torch.tensor([draw.randint(0, capacity) for _ in range(batch)], dtype=torch.int64)
    check(positions, table, prefix, block_size, draw.randrange(dcp_size), dcp_size, interleave, device, draw)


def test_huge_positions(device: str) -> None:
    """A million tokens and page ids whose slots pass 2**31."""
    positions = torch.tensor([[2**20 - 1, 2**20, 10**9, 2**33]])
    table = torch.full((1, 2**14 + 1), 2**26, dtype=torch.int32)
    _, _, slots, _ = check(positions, table, torch.tensor([2**20]), 64, 0, 1, 1, device)
    assert slots.tolist() == [2**32 + 63, 2**32, layout.PAD_SLOT, layout.PAD_SLOT]


def test_bounds_are_localised_per_row(device: str) -> None:
    """Each row's own global length is localised, never an offset subtracted in local space."""
    table = torch.arange(1, 9, dtype=torch.int32)[None]

    def bounds(first, count, block_size, rank, dcp_size):
        positions = torch.arange(first, first + count)[None]
        prefix = torch.tensor([first])
        interleave = 32 if block_size == 32 else 1
        return check(positions, table, prefix, block_size, rank, dcp_size, interleave, device)[0].tolist()

    assert bounds(7, 3, 16, 1, 2) == [4, 4, 5]
    assert bounds(30, 8, 32, 0, 4) == [31, 32, 32, 32, 32, 32, 32, 32]
    assert bounds(30, 8, 32, 1, 4) == [0, 0, 1, 2, 3, 4, 5, 6]
    assert [bounds(3, 8, 16, rank, 16) for rank in (2, 3, 7)] == [[1] * 8, [1] * 8, [0] * 4 + [1] * 4]


def test_rows_of_a_block_see_one_another(device: str) -> None:
    """All valid rows of a bidirectional block share the bound of its last row; padded rows stay empty."""
    positions = torch.tensor([[7, 8, 9, -1], [-1, -1, 0, 1], [-1, -1, -1, -1]], device=device)
    table = torch.ones(3, 1, dtype=torch.int32, device=device)
    bounds = block_metadata(positions, table, torch.zeros(3, dtype=torch.int64, device=device), 64, 1, 2, 1)[0]
    assert bounds.tolist() == [5, 5, 5, 0, 0, 0, 1, 1, 0, 0, 0, 0]


def test_slots_of_a_sharded_pool(device: str) -> None:
    """Position 70 of a pool shared by four ranks lies on rank 2 only."""
    positions = torch.tensor([[70]], device=device)
    table = torch.tensor([[5, 9, 2, 7, 11]], dtype=torch.int32, device=device)
    prefix = torch.tensor([70], device=device)
    slots = [step_metadata(positions, table, prefix, 16, rank, 4, 1)[2].item() for rank in range(4)]
    assert slots == [-1, -1, 145, -1]


def test_block_past_the_end_writes_nothing(device: str) -> None:
    """Positions past the last column get no slot; those before it keep theirs."""
    positions = torch.arange(1020, 1028, device=device)[None]
    table = torch.arange(1, 17, dtype=torch.int32, device=device)[None]
    slots = step_metadata(positions, table, torch.tensor([1020], device=device), 64, 0, 1, 1)[2].tolist()
    assert slots == [16 * 64 + 60, 16 * 64 + 61, 16 * 64 + 62, 16 * 64 + 63, -1, -1, -1, -1]


def test_rewound_lengths_are_recomputed(device: str) -> None:
    """After four rejected drafts the local length follows from the new global length."""
    table = torch.ones(1, 4, dtype=torch.int32, device=device)
    for length, local in ((101, 13), (97, 12)):
        positions = torch.tensor([[length - 1]], device=device)
        bounds, _, _, prefix = step_metadata(positions, table, torch.tensor([length], device=device), 16, 4, 8, 1)
        assert bounds.tolist() == prefix.tolist() == [local]


@pytest.mark.gpu
def test_captured_launch_follows_its_inputs() -> None:
    """A replay reads what the buffers hold then."""
    positions = torch.tensor([[5, 6]], device="cuda")
    table = torch.tensor([[3, 4]], dtype=torch.int32, device="cuda")
    prefix = torch.tensor([5], device="cuda")
    step_metadata(positions, table, prefix, 4, 1, 2, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step_metadata(positions, table, prefix, 4, 1, 2, 1)
    positions.copy_(torch.tensor([[9, -1]]))
    table.copy_(torch.tensor([[7, 2]]))
    prefix.fill_(8)
    graph.replay()
    want = metadata.step_metadata(positions.cpu(), table.cpu(), prefix.cpu(), 4, 1, 2, 1)
    assert [part.tolist() for part in captured] == [part.tolist() for part in want]
