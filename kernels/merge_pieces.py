# SPDX-License-Identifier: Apache-2.0
"""Merging the parts of requests whose keys were divided by their lengths."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .merge import merge_item, merge_options

_FEW = 1024  # rows x heads: one request may have nearly all parts


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
    BLOCK_LATENT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)  # row * heads + head
    row = item // heads
    request = row // ROWS
    count = tl.load(parts + 2 * request + 1)
    if count > 1:  # a single piece is the result already
        stride = tl.cast(ROWS * heads, tl.int64)
        line = tl.load(parts + 2 * request) * stride + item - request * stride
        merge_item(
            outs + line * LATENT, lses + line, out, lse, item, count, stride * LATENT, stride, 1,
            LATENT, BLOCK_LATENT, CHUNK,
        )  # fmt: skip


def merge_pieces(outs: Tensor, lses: Tensor, parts: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge ``outs [N, rows, H, R]``, ``lses [N, rows, H]`` into contiguous ``out [B * rows, H, R]``, ``lse``.

    ``parts [B, 2]`` int32: a request's first part, and their number. Rows of requests of one part are left as they are.
    """
    rows, heads, latent = out.shape
    options = merge_options(latent, outs.shape[0], 512, 8 if rows * heads <= _FEW else 4)
    _merge_pieces[(rows * heads, triton.cdiv(latent, options["BLOCK_LATENT"]))](
        outs,
        lses,
        out,
        lse,
        parts,
        heads,
        ROWS=outs.shape[1],
        LATENT=latent,
        **options,
    )
