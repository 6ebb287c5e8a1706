# SPDX-License-Identifier: Apache-2.0
"""Merging the parts of requests whose keys were divided by their lengths."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .divide import Division
from .merge import block_sizes, merged


@triton.jit
def _merge_pieces(
    outs,
    lses,
    out,
    lse,
    parts,
    heads,
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)  # row * heads + head
    row = item // heads
    column = tl.program_id(1) * BLOCK_LATENT + tl.arange(0, BLOCK_LATENT)
    request = row // ROWS
    count = tl.load(parts + 2 * request + 1)
    if count > 1:  # a single piece is the result already
        stride = (ROWS * heads).to(tl.int64)
        line = tl.load(parts + 2 * request) * stride + item - request * stride
        result, log = merged(
            outs + line * LATENT, lses + line, count, stride * LATENT, stride, 1, column,
            LATENT, BLOCK_PARTS, BLOCK_LATENT, CHUNK,
        )  # fmt: skip
        tl.store(out + item * LATENT + column, result.to(out.dtype.element_ty), mask=column < LATENT)
        if tl.program_id(1) == 0:
            tl.store(lse + item, log)


def merge_pieces(outs: Tensor, lses: Tensor, division: Division, out: Tensor, lse: Tensor) -> None:
    """Merge ``outs [parts, rows, H, R]``, ``lses [parts, rows, H]`` into contiguous ``out [B * rows, H, R]``, ``lse``.

    Rows of requests that are in one piece are left as they are.
    """
    rows, heads, latent = out.shape
    columns, chunk = block_sizes(rows * heads, latent, division.most_parts)
    _merge_pieces[(rows * heads, triton.cdiv(latent, columns))](
        outs,
        lses,
        out,
        lse,
        division.parts,
        heads,
        ROWS=outs.shape[1],
        LATENT=latent,
        BLOCK_PARTS=triton.next_power_of_2(division.most_parts),
        BLOCK_LATENT=columns,
        CHUNK=chunk,
        num_warps=2 if columns <= 64 else 4,
    )
