# SPDX-License-Identifier: Apache-2.0
"""Merging the parts of requests whose keys were divided by their lengths."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .merge import merged

_FEW = 1024  # rows x heads that fill the device in narrow column blocks only, if one request has nearly all parts


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
        stride = tl.cast(ROWS * heads, tl.int64)
        line = tl.load(parts + 2 * request) * stride + item - request * stride
        result, log = merged(
            outs + line * LATENT, lses + line, count, stride * LATENT, stride, 1, column,
            LATENT, BLOCK_PARTS, BLOCK_LATENT, CHUNK,
        )  # fmt: skip
        tl.store(out + item * LATENT + column, result.to(out.dtype.element_ty), mask=column < LATENT)
        if tl.program_id(1) == 0:
            tl.store(lse + item, log)


def merge_pieces(outs: Tensor, lses: Tensor, parts: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge ``outs [N, rows, H, R]``, ``lses [N, rows, H]`` into contiguous ``out [B * rows, H, R]``, ``lse``.

    ``parts [B, 2]`` int32: a request's first part, and their number. Rows of requests of one part are left as they are.
    """
    rows, heads, latent = out.shape
    columns = min(64 if rows * heads <= _FEW else 512, triton.next_power_of_2(latent))
    _merge_pieces[(rows * heads, triton.cdiv(latent, columns))](
        outs,
        lses,
        out,
        lse,
        parts,
        heads,
        ROWS=outs.shape[1],
        LATENT=latent,
        BLOCK_PARTS=triton.next_power_of_2(len(outs)),
        BLOCK_LATENT=columns,
        CHUNK=2048 // columns,
        num_warps=2 if columns <= 64 else 4,
    )
