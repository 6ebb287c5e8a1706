# SPDX-License-Identifier: Apache-2.0
"""The token layout of :mod:`dcp_compile.layout` as Triton device functions."""

import triton
import triton.language as tl

from dcp_compile.layout import NULL_PAGE, PAD_SLOT

PAD = tl.constexpr(PAD_SLOT)
NULL = tl.constexpr(NULL_PAGE)


@triton.jit
def local_length(length, RANK: tl.constexpr, DCP_SIZE: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Number of the first ``length`` (>= 0) tokens that the rank stores."""
    span: tl.constexpr = DCP_SIZE * INTERLEAVE
    rest = length % span - RANK * INTERLEAVE
    return length // span * INTERLEAVE + tl.minimum(tl.maximum(rest, 0), INTERLEAVE)


@triton.jit
def cp_local_slot(
    position,
    table_row,
    column_stride,
    columns,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    DCP_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
):
    """Slot of ``position`` on this rank, int64.

    ``table_row`` points at the request's first page id, one pointer per position. PAD for positions of other ranks,
    padded rows (negative position), positions past the last column, and the null page.
    """
    span: tl.constexpr = BLOCK_SIZE * DCP_SIZE
    known = tl.maximum(position, 0).to(tl.int64)
    column = known // span
    offset = known % span
    mine = (position >= 0) & (column < columns) & (known // INTERLEAVE % DCP_SIZE == RANK)
    page = tl.load(table_row + column * column_stride, mask=mine, other=NULL).to(tl.int64)
    inside = offset // (INTERLEAVE * DCP_SIZE) * INTERLEAVE + offset % INTERLEAVE
    return tl.where(mine & (page != NULL), page * BLOCK_SIZE + inside, PAD)
