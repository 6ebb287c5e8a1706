# SPDX-License-Identifier: Apache-2.0
"""All metadata of one step in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .slot import cp_local_slot, local_length

_BLOCK = 128


@triton.jit(do_not_specialize=["batch", "rows", "columns"])
def _step_metadata(
    positions,
    block_table,
    prefix_lengths,
    bounds,
    requests,
    slots,
    prefix_bounds,
    batch,
    rows,  # per request
    columns,
    position_stride_b,
    position_stride_s,
    table_stride_b,
    table_stride_w,
    prefix_stride,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    DCP_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BIDIRECTIONAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # The same index counts rows (all requests) and, for the prefix, requests.
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    live = index < batch * rows
    request = index // tl.maximum(rows, 1)
    row = index - request * rows
    request_positions = positions + request.to(tl.int64) * position_stride_b
    position = tl.load(request_positions + row.to(tl.int64) * position_stride_s, mask=live, other=-1)
    last = position
    if BIDIRECTIONAL:
        for other in range(rows):
            neighbour = tl.load(request_positions + other * position_stride_s, mask=position >= 0, other=-1)
            last = tl.maximum(last, neighbour)
    bound = local_length(tl.maximum(last, -1) + 1, RANK, DCP_SIZE, INTERLEAVE)
    table_row = block_table + request.to(tl.int64) * table_stride_b
    slot = cp_local_slot(position, table_row, table_stride_w, columns, BLOCK_SIZE, RANK, DCP_SIZE, INTERLEAVE)
    tl.store(bounds + index, bound.to(tl.int32), mask=live)
    tl.store(requests + index, request, mask=live)
    tl.store(slots + index, slot, mask=live)

    prefix = tl.load(prefix_lengths + index.to(tl.int64) * prefix_stride, mask=index < batch, other=0)
    tl.store(
        prefix_bounds + index, local_length(prefix, RANK, DCP_SIZE, INTERLEAVE).to(tl.int32), mask=index < batch
    )


def _launch(
    positions: Tensor,
    block_table: Tensor,
    prefix_lengths: Tensor,
    block_size: int,
    rank: int,
    dcp_size: int,
    interleave: int,
    bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, rows = positions.shape
    bounds = positions.new_empty(batch * rows, dtype=torch.int32)
    requests = torch.empty_like(bounds)
    slots = torch.empty_like(bounds, dtype=torch.int64)
    prefix_bounds = positions.new_empty(batch, dtype=torch.int32)
    if batch:
        _step_metadata[(triton.cdiv(batch * max(rows, 1), _BLOCK),)](
            positions,
            block_table,
            prefix_lengths,
            bounds,
            requests,
            slots,
            prefix_bounds,
            batch,
            rows,
            block_table.shape[1],
            *positions.stride(),
            *block_table.stride(),
            prefix_lengths.stride(0),
            BLOCK_SIZE=block_size,
            RANK=rank,
            DCP_SIZE=dcp_size,
            INTERLEAVE=interleave,
            BIDIRECTIONAL=bidirectional,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return bounds, requests, slots, prefix_bounds


def step_metadata(
    positions: Tensor,
    block_table: Tensor,
    prefix_lengths: Tensor,
    block_size: int,
    rank: int,
    dcp_size: int,
    interleave: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launcher of ``dcp::step_metadata``.

    Args:
        positions: ``[B, S]``, -1 = padded row. block_table: ``[B, columns]``. prefix_lengths: ``[B]`` tokens. Any
            strides, any integer type.

    Returns:
        ``(bounds [T] int32, requests [T] int32, slots [T] int64, prefix_bounds [B] int32)``, T = B * S.
    """
    return _launch(positions, block_table, prefix_lengths, block_size, rank, dcp_size, interleave, False)


def block_metadata(
    positions: Tensor,
    block_table: Tensor,
    prefix_lengths: Tensor,
    block_size: int,
    rank: int,
    dcp_size: int,
    interleave: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launcher of ``dcp::block_metadata``: as :func:`step_metadata`, with the bound of a request's last row for all."""
    return _launch(positions, block_table, prefix_lengths, block_size, rank, dcp_size, interleave, True)
