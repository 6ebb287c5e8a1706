# SPDX-License-Identifier: Apache-2.0
"""Exchanging attention partials through mailboxes, and merging them by their log-sum-exp in the same kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .mailbox import Mailbox, await_all, constants, grid, place, region, signal


@triton.jit(do_not_specialize=["units", "polls"])
def _merge_ranks(
    part,
    part_lse,
    out,
    bases,
    calls,
    lost,
    units,
    heads,
    heads_apart,
    stride_t,
    stride_h,
    stride_r,
    lse_stride_t,
    lse_stride_h,
    polls,
    LATENT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    UNITS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STRIDE: tl.constexpr,
    LSE_AT: tl.constexpr,
    DATA_AT: tl.constexpr,
):
    channel = tl.program_id(0)
    epoch = tl.load(calls + channel) + 1
    column = tl.arange(0, BLOCK)
    inside = column < LATENT
    for unit in range(channel, units, CHANNELS):
        row = (unit // heads).to(tl.int64)
        message = place(epoch, RANK, unit, SIZE, UNITS)
        for peer in range(SIZE):
            head = unit % heads + peer * heads_apart  # the peer's head in our partials
            value = tl.load(part + row * stride_t + head * stride_h + column * stride_r, mask=inside)
            data = region(bases, peer, DATA_AT, part.dtype.element_ty)
            tl.store(data + message * STRIDE + column, value, mask=inside)
            log = tl.load(part_lse + row * lse_stride_t + head * lse_stride_h)
            tl.store(region(bases, peer, LSE_AT, tl.float32) + message, log)
    signal(bases, channel, epoch, RANK, SIZE, CHANNELS)
    await_all(bases, channel, epoch, polls, lost, RANK, SIZE, CHANNELS)
    lses = region(bases, RANK, LSE_AT, tl.float32)
    data = region(bases, RANK, DATA_AT, part.dtype.element_ty)
    source = tl.arange(0, BLOCK_SIZE)
    for unit in range(channel, units, CHANNELS):
        message = place(epoch, source, unit, SIZE, UNITS)
        # Written by peers: not from the L1 cache.
        log = tl.load(lses + message, mask=source < SIZE, other=float("-inf"), cache_modifier=".cg")
        log = tl.where((log == log) & (log < float("inf")), log, float("-inf"))
        top = tl.max(log, 0)
        weight = tl.exp(log - tl.where(top == float("-inf"), 0.0, top))
        total = tl.sum(weight, 0)
        # A part of weight 0 is not even read: its output is undefined.
        value = tl.load(
            data + message[:, None] * STRIDE + column[None, :],
            mask=(weight > 0)[:, None] & inside[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        merged = tl.sum(value.to(tl.float32) * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
        tl.store(out + unit * LATENT + column, merged.to(out.dtype.element_ty), mask=inside)
    tl.store(calls + channel, epoch)


def merge_ranks(out: Tensor, lse: Tensor, heads: int, mailbox: Mailbox) -> Tensor:
    """The merged attention of this rank's heads, from the partials of all ranks.

    Args:
        out: ``[T, H, R]``. lse: ``[T, H]`` float32, natural logarithms. Any strides; -inf, +inf and NaN mark empty parts.
        heads: of this rank: H where every rank has all heads, else H / size, and rank r has those from r * heads on.

    Returns:
        ``[T, heads, R]`` in the dtype of ``out``; 0 where every part is empty.

    Raises:
        ValueError: the message is larger than the mailbox.
    """
    rows, all_heads, latent = out.shape
    if not mailbox.fits(rows * heads, latent * out.element_size()):
        raise ValueError(mailbox.too_large(out))
    merged = out.new_empty(rows, heads, latent)
    if rows * heads:
        _merge_ranks[grid(rows * heads)](
            out,
            lse,
            merged,
            mailbox.bases,
            mailbox.calls,
            mailbox.lost,
            rows * heads,
            heads,
            heads if all_heads > heads else 0,
            *out.stride(),
            *lse.stride(),
            mailbox.polls,
            LATENT=latent,
            BLOCK=triton.next_power_of_2(latent),
            BLOCK_SIZE=triton.next_power_of_2(mailbox.size),
            **constants(mailbox, out),
        )
    return merged
