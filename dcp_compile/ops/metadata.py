# SPDX-License-Identifier: Apache-2.0
"""Step metadata: everything attention and the KV writes need to know that follows from positions and block tables.

The small operators state what each value is; the absorb and write passes emit them naively, once per layer. The hoist
pass moves them to the prologue and replaces them by ``step_metadata``, which computes all of them in one launch.

Shapes: positions ``[B, S]`` int64 (global positions, -1 = padded row), block_table ``[B, columns]`` int32,
prefix_lengths ``[B]`` int64 (global). T = B * S rows, request-major.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import layout
from ._library import define, fake, reference

define("row_bounds(Tensor positions, int rank, int dcp_size, int interleave) -> Tensor")
define("block_bounds(Tensor positions, int rank, int dcp_size, int interleave) -> Tensor")
define("row_requests(Tensor positions) -> Tensor")
define(
    "cp_local_slot(Tensor positions, Tensor block_table, int block_size, int rank, int dcp_size, int interleave) -> Tensor"
)
define("prefix_bounds(Tensor prefix_lengths, int rank, int dcp_size, int interleave) -> Tensor")
_FUSED = (
    "(Tensor positions, Tensor block_table, Tensor prefix_lengths, int block_size, int rank, int dcp_size, "
    "int interleave) -> (Tensor, Tensor, Tensor, Tensor)"
)
define(f"step_metadata{_FUSED}")
define(f"block_metadata{_FUSED}")

NAMES = (
    "row_bounds", "block_bounds", "row_requests", "cp_local_slot", "prefix_bounds", "step_metadata", "block_metadata",
)  # fmt: skip


@reference("row_bounds")
def row_bounds(positions: Tensor, rank: int, dcp_size: int, interleave: int) -> Tensor:
    """Local keys each row may see, ``[T]`` int32: the row itself and all before it; 0 for a padded row."""
    return layout.local_length(positions.reshape(-1) + 1, rank, dcp_size, interleave).to(torch.int32)


@reference("block_bounds")
def block_bounds(positions: Tensor, rank: int, dcp_size: int, interleave: int) -> Tensor:
    """Local keys each row of a bidirectional block may see, ``[T]`` int32: up to its request's last row."""
    last = positions.amax(dim=1, keepdim=True) if positions.shape[1] else positions
    return row_bounds(torch.where(positions >= 0, last, -1), rank, dcp_size, interleave)


@reference("row_requests")
def row_requests(positions: Tensor) -> Tensor:
    """Request of each row, ``[T]`` int32."""
    batch, rows = positions.shape
    requests = torch.arange(batch, dtype=torch.int32, device=positions.device)
    return requests[:, None].expand(batch, rows).reshape(-1).contiguous()


@reference("cp_local_slot")
def cp_local_slot(
    positions: Tensor, block_table: Tensor, block_size: int, rank: int, dcp_size: int, interleave: int
) -> Tensor:
    """Slot each row's latent is written to on this rank, ``[T]`` int64, or PAD_SLOT (see :func:`layout.local_slot`)."""
    return layout.local_slot(positions, block_table, block_size, rank, dcp_size, interleave).reshape(-1)


@reference("prefix_bounds")
def prefix_bounds(prefix_lengths: Tensor, rank: int, dcp_size: int, interleave: int) -> Tensor:
    """Local keys of each request's prefix, ``[B]`` int32."""
    return layout.local_length(prefix_lengths, rank, dcp_size, interleave).to(torch.int32)


@reference("step_metadata")
def step_metadata(
    positions: Tensor,
    block_table: Tensor,
    prefix_lengths: Tensor,
    block_size: int,
    rank: int,
    dcp_size: int,
    interleave: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(row_bounds, row_requests, cp_local_slot, prefix_bounds)`` of one step."""
    return (
        row_bounds(positions, rank, dcp_size, interleave),
        row_requests(positions),
        cp_local_slot(positions, block_table, block_size, rank, dcp_size, interleave),
        prefix_bounds(prefix_lengths, rank, dcp_size, interleave),
    )


@reference("block_metadata")
def block_metadata(
    positions: Tensor,
    block_table: Tensor,
    prefix_lengths: Tensor,
    block_size: int,
    rank: int,
    dcp_size: int,
    interleave: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(block_bounds, row_requests, cp_local_slot, prefix_bounds)`` of one step of bidirectional blocks."""
    metadata = step_metadata(positions, block_table, prefix_lengths, block_size, rank, dcp_size, interleave)
    return (block_bounds(positions, rank, dcp_size, interleave), *metadata[1:])


@fake("row_bounds")
def _(positions, rank, dcp_size, interleave):
    return positions.new_empty(positions.numel(), dtype=torch.int32)


@fake("block_bounds")
def _(positions, rank, dcp_size, interleave):
    return positions.new_empty(positions.numel(), dtype=torch.int32)


@fake("row_requests")
def _(positions):
    return positions.new_empty(positions.numel(), dtype=torch.int32)


@fake("cp_local_slot")
def _(positions, block_table, block_size, rank, dcp_size, interleave):
    return positions.new_empty(positions.numel(), dtype=torch.int64)


@fake("prefix_bounds")
def _(prefix_lengths, rank, dcp_size, interleave):
    return prefix_lengths.new_empty(prefix_lengths.shape[0], dtype=torch.int32)


@fake("block_metadata")
@fake("step_metadata")
def _(positions, block_table, prefix_lengths, block_size, rank, dcp_size, interleave):
    rows = positions.numel()
    return (
        positions.new_empty(rows, dtype=torch.int32),
        positions.new_empty(rows, dtype=torch.int32),
        positions.new_empty(rows, dtype=torch.int64),
        prefix_lengths.new_empty(prefix_lengths.shape[0], dtype=torch.int32),
    )
