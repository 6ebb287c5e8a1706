# SPDX-License-Identifier: Apache-2.0
"""Which rank owns which token, and where it lies there.

The single source of truth for decode context parallelism (DCP): ops, kernels, cache and tests all derive from these
functions. Tokens are dealt to the ranks in runs of ``interleave``: rank 0 gets positions ``[0, interleave)``, rank 1 the
next run, and so on, round robin. Every function takes plain ints or integer tensors and returns the same kind.

Symbols: D = dcp_size, I = interleave, b = block_size (tokens per page on one rank).
"""

from __future__ import annotations

from typing import TypeVar

import torch

Int = TypeVar("Int", int, torch.Tensor)

PAD_SLOT = -1
NULL_PAGE = 0


def _clip(value: Int, low: int, high: int) -> Int:
    if isinstance(value, torch.Tensor):
        return value.clamp(low, high)
    return max(low, min(high, value))


def owner(position: Int, dcp_size: int, interleave: int) -> Int:
    """Rank that stores ``position``: ``(position // I) % D``."""
    return (position // interleave) % dcp_size


def local_length(length: Int, rank: int, dcp_size: int, interleave: int) -> Int:
    """Number of the first ``length`` tokens that ``rank`` stores; summed over the ranks it is ``length``."""
    span = dcp_size * interleave
    return length // span * interleave + _clip(length % span - rank * interleave, 0, interleave)


def row_bounds(length: Int, query_len: int, rank: int, dcp_size: int, interleave: int) -> list[int] | torch.Tensor:
    """Keys each of the last ``query_len`` rows may see on ``rank``, causal, the row itself included.

    ``length`` counts the query rows. Row j is at position ``length - query_len + j``. The bound of each row is localised
    from its own global length: subtracting row offsets from a local length gives wrong results for D > 1.

    Returns a list for an int ``length``, else a tensor of shape ``[*length.shape, query_len]``.
    """
    if isinstance(length, torch.Tensor):
        ends = length[..., None] - torch.arange(query_len - 1, -1, -1, device=length.device)
        return local_length(ends.clamp_min(0), rank, dcp_size, interleave)
    return [local_length(max(length - back, 0), rank, dcp_size, interleave) for back in range(query_len - 1, -1, -1)]


def local_index(position: Int, dcp_size: int, interleave: int) -> Int:
    """Row index of ``position`` among its owner's tokens."""
    span = dcp_size * interleave
    return position // span * interleave + position % interleave


def local_slot(
    position: Int,
    block_table_row: list[int] | torch.Tensor,
    block_size: int,
    rank: int,
    dcp_size: int,
    interleave: int,
) -> Int:
    """Slot (row of the flattened page pool) of ``position`` on ``rank``, or ``PAD_SLOT``.

    One column of the block table covers ``block_size * D`` positions and names the same page on every rank. PAD_SLOT is
    returned for positions of other ranks, negative positions, positions past the table, and the null page.

    Args:
        position: an int, or an integer tensor ``[..., S]``.
        block_table_row: page ids ``[columns]`` of one request, or ``[..., columns]`` with the leading dims of ``position``.
    """
    tensor = torch.as_tensor(position)
    table = torch.as_tensor(block_table_row, device=tensor.device)
    columns = table.shape[-1]
    column = tensor // (block_size * dcp_size)
    inside = (tensor >= 0) & (column < columns)
    if columns == 0:
        page = torch.zeros_like(tensor)
    elif table.dim() == 1:
        page = table[column.clamp(0, columns - 1).long()]
    else:
        page = table.gather(-1, column.clamp(0, columns - 1).long())
    offset = local_index(tensor % (block_size * dcp_size), dcp_size, interleave)
    mine = inside & (owner(tensor, dcp_size, interleave) == rank) & (page != NULL_PAGE)
    slot = torch.where(mine, page.to(tensor.dtype) * block_size + offset, PAD_SLOT)
    return slot if isinstance(position, torch.Tensor) else int(slot)


def pages_needed(length: int, block_size: int, dcp_size: int) -> int:
    """Block-table columns (= pages on each rank) that ``length`` tokens take."""
    return -(-length // (block_size * dcp_size))
