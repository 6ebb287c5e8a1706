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
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PER: tl.constexpr,
    ROOM: tl.constexpr,
    CHANNELS: tl.constexpr,
    STRIDE: tl.constexpr,
    LSE_AT: tl.constexpr,
    DATA_AT: tl.constexpr,
):
    channel = tl.program_id(0)
    epoch = tl.load(calls + channel) + 1
    column = tl.arange(0, BLOCK)[None, :]
    for first in range(channel * PER, units, CHANNELS * PER):
        unit = first + tl.arange(0, PER)
        known = unit < units
        row = (unit // heads).to(tl.int64)
        message = place(epoch, RANK, unit, SIZE, PER, ROOM, CHANNELS)
        for peer in range(SIZE):
            head = unit % heads + peer * heads_apart  # the peer's head in our partials
            inside = known[:, None] & (column < LATENT)
            value = tl.load(part + (row * stride_t + head * stride_h)[:, None] + column * stride_r, mask=inside)
            data = region(bases, peer, DATA_AT, part.dtype.element_ty)
            tl.store(data + message[:, None] * STRIDE + column, value, mask=inside)
            log = tl.load(part_lse + row * lse_stride_t + head * lse_stride_h, mask=known)
            tl.store(region(bases, peer, LSE_AT, tl.float32) + message, log, mask=known)
    signal(bases, channel, epoch, RANK, SIZE, BLOCK_SIZE, CHANNELS)
    await_all(bases, channel, epoch, polls, lost, RANK, SIZE, BLOCK_SIZE, CHANNELS)
    lses = region(bases, RANK, LSE_AT, tl.float32)
    data = region(bases, RANK, DATA_AT, part.dtype.element_ty)
    source = tl.arange(0, BLOCK_SIZE)[None, :]
    for first in range(channel * PER, units, CHANNELS * PER):
        unit = first + tl.arange(0, PER)
        known = unit < units
        every = place(epoch, source, unit[:, None], SIZE, PER, ROOM, CHANNELS)
        logs = _known_lse(lses + every, known[:, None] & (source < SIZE))
        top = tl.max(logs, 1)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp(logs - top[:, None]), 1)
        merged = tl.zeros([PER, BLOCK], tl.float32)
        for peer in range(SIZE):
            message = place(epoch, peer, unit, SIZE, PER, ROOM, CHANNELS)
            weight = tl.exp(_known_lse(lses + message, known) - top)[:, None]
            # A part of weight 0 is not even read: its output is undefined.
            inside = (weight > 0) & (column < LATENT)
            value = tl.load(data + message[:, None] * STRIDE + column, mask=inside, other=0.0, cache_modifier=".cg")
            merged += value.to(tl.float32) * weight
        merged /= tl.where(total > 0, total, 1.0)[:, None]
        target = out + unit.to(tl.int64)[:, None] * LATENT + column
        tl.store(target, merged.to(out.dtype.element_ty), mask=known[:, None] & (column < LATENT))
    tl.store(calls + channel, epoch)


@triton.jit
def _known_lse(pointer, mask):
    """LSEs written by peers (not from the L1 cache); -inf for what marks an empty part."""
    log = tl.load(pointer, mask=mask, other=float("-inf"), cache_modifier=".cg")
    return tl.where((log == log) & (log < float("inf")), log, float("-inf"))


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
            **constants(mailbox, out, rows * heads),
        )
    return merged
