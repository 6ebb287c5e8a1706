# SPDX-License-Identifier: Apache-2.0
"""Merging attention partials by their log-sum-exp: over the ranks of a group, and over the splits of one call."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_FEW = 512  # rows x heads


@triton.jit
def merge_item(
    outs,
    lses,
    out,
    lse,
    item,
    parts,
    out_stride_n,
    lse_stride_n,
    out_stride_r,
    LATENT: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Merge the first ``parts`` of what ``outs`` and ``lses`` point at, of one row and head, into line ``item`` of the result.
    Programs of axis 1 share its columns."""
    column = tl.program_id(1) * BLOCK_LATENT + tl.arange(0, BLOCK_LATENT)
    top = float("-inf")
    total = tl.zeros([CHUNK], tl.float32)
    weighted = tl.zeros([CHUNK, BLOCK_LATENT], tl.float32)
    for first in range(0, parts, CHUNK):
        n = first + tl.arange(0, CHUNK)
        log = tl.load(lses + n.to(tl.int64) * lse_stride_n, mask=n < parts, other=float("-inf"))
        # Read without waiting for the weights: what an empty part holds is undefined, and not used.
        value = tl.load(
            outs + n.to(tl.int64)[:, None] * out_stride_n + column[None, :] * out_stride_r,
            mask=(n < parts)[:, None] & (column < LATENT)[None, :],
            other=0.0,
        )
        log = tl.where((log == log) & (log < float("inf")), log, float("-inf"))
        new_top = tl.maximum(top, tl.max(log, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        decay = tl.exp(top - shift)
        weight = tl.exp(log - shift)
        total = total * decay + weight
        weighted = weighted * decay + tl.where((weight > 0)[:, None], value.to(tl.float32) * weight[:, None], 0.0)
        top = new_top
    weights = tl.sum(total, 0)
    some = tl.where(weights > 0, weights, 1.0)
    result = tl.sum(weighted, 0) / some
    tl.store(out + item * LATENT + column, result.to(out.dtype.element_ty), mask=column < LATENT)
    if tl.program_id(1) == 0:
        tl.store(lse + item, tl.where(weights > 0, top + tl.log(some), float("-inf")))


@triton.jit(do_not_specialize=["parts"])
def _merge(
    outs,
    lses,
    out,
    lse,
    parts,
    heads,
    out_stride_n,
    out_stride_t,
    out_stride_h,
    out_stride_r,
    lse_stride_n,
    lse_stride_t,
    lse_stride_h,
    LATENT: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)  # row * heads + head
    row = item // heads
    head = item % heads
    lses += row * lse_stride_t + head * lse_stride_h
    outs += row * out_stride_t + head * out_stride_h
    merge_item(
        outs, lses, out, lse, item, parts, out_stride_n, lse_stride_n, out_stride_r,
        LATENT, BLOCK_LATENT, CHUNK,
    )  # fmt: skip


def merge_options(latent: int, parts: int, columns: int, chunk: int) -> dict[str, int]:
    """What to launch with: at most ``columns`` per program, which has ``chunk`` parts on their way at once."""
    columns = min(columns, triton.next_power_of_2(latent))
    chunk = min(chunk, triton.next_power_of_2(max(parts, 1)))
    return dict(BLOCK_LATENT=columns, CHUNK=chunk, num_warps=max(columns // 256, 1))


def merge_into(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge ``outs [N, T, H, R]``, ``lses [N, T, H]`` (any strides) into contiguous ``out [T, H, R]``, ``lse [T, H]``.

    Parts with LSE -inf, +inf or NaN do not count, whatever their output is. The type of ``out`` may differ from that of
    ``outs``.
    """
    parts, rows, heads, latent = outs.shape
    if rows * heads == 0:
        return
    columns, chunk = 512, 4
    if rows * heads <= _FEW:  # of many parts a program has as many values on their way as its registers hold
        chunk = min(32, triton.next_power_of_2(max(parts, 1)))
        columns = 2048 // chunk
    options = merge_options(latent, parts, columns, chunk)
    _merge[(rows * heads, triton.cdiv(latent, options["BLOCK_LATENT"]))](
        outs,
        lses,
        out,
        lse,
        parts,
        heads,
        *outs.stride(),
        *lses.stride(),
        LATENT=latent,
        **options,
    )


def merge_partials(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Launcher of ``dcp::merge_partials``.

    Args:
        outs: ``[N, T, H, R]``. lses: ``[N, T, H]`` natural logarithms. Any strides.

    Returns:
        ``(out [T, H, R] in the dtype of outs, lse [T, H] float32)``; 0 and -inf where every part is empty.
    """
    out = outs.new_empty(outs.shape[1:])
    lse = lses.new_empty(lses.shape[1:], dtype=torch.float32)
    merge_into(outs, lses, out, lse)
    return out, lse


def merge_packed(packed: Tensor, latent: int) -> Tensor:
    """Launcher of ``dcp::merge_packed``: ``[N, T, H, latent + lanes]`` of N ranks into ``[T, H, latent]``.

    The LSE lanes of a message are read in place, as the float32 they are, unless an odd latent size misaligns them.
    """
    lanes = packed[..., latent:]
    if packed.dtype == torch.float32:
        lses = lanes[..., 0]
    elif latent % 2 == 0 and packed.is_contiguous():
        lses = packed.view(torch.float32)[..., latent // 2]
    else:
        lses = lanes.clone(memory_format=torch.contiguous_format).view(torch.float32)[..., 0]
    out = packed.new_empty((*packed.shape[1:3], latent))
    merge_into(packed[..., :latent], lses, out, lses.new_empty(packed.shape[1:3]))
    return out
