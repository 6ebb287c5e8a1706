# SPDX-License-Identifier: Apache-2.0
"""Gathering the query heads of all ranks through mailboxes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .mailbox import Mailbox, await_all, constants, grid, place, region, signal


@triton.jit(do_not_specialize=["units", "polls"])
def _gather_heads(
    query,
    out,
    bases,
    calls,
    lost,
    units,
    heads,
    stride_t,
    stride_h,
    stride_e,
    polls,
    WIDTH: tl.constexpr,
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
        unit = first + tl.arange(0, PER)[:, None]
        inside = (unit < units) & (column < WIDTH)
        row = (unit // heads).to(tl.int64)
        value = tl.load(query + row * stride_t + unit % heads * stride_h + column * stride_e, mask=inside)
        message = place(epoch, RANK, unit, SIZE, PER, ROOM, CHANNELS) * STRIDE + column
        for peer in range(SIZE):
            tl.store(region(bases, peer, DATA_AT, query.dtype.element_ty) + message, value, mask=inside)
    signal(bases, channel, epoch, RANK, SIZE, BLOCK_SIZE, CHANNELS)
    await_all(bases, channel, epoch, polls, lost, RANK, SIZE, BLOCK_SIZE, CHANNELS)
    data = region(bases, RANK, DATA_AT, query.dtype.element_ty)
    for first in range(channel * PER, units, CHANNELS * PER):
        unit = first + tl.arange(0, PER)[:, None]
        inside = (unit < units) & (column < WIDTH)
        row = (unit // heads).to(tl.int64)
        for source in range(SIZE):
            message = place(epoch, source, unit, SIZE, PER, ROOM, CHANNELS) * STRIDE + column
            value = tl.load(data + message, mask=inside, cache_modifier=".cg")  # written by a peer: not from the L1 cache
            to = (row * SIZE + source) * heads + unit % heads
            tl.store(out + to * WIDTH + column, value, mask=inside)
    tl.store(calls + channel, epoch)


def gather_heads(query: Tensor, mailbox: Mailbox) -> Tensor:
    """Queries of all ranks' heads in rank order: ``[T, h, E]`` (any strides) of each into ``[T, size * h, E]`` for all.

    Raises:
        ValueError: the message is larger than the mailbox.
    """
    rows, heads, width = query.shape
    if not mailbox.fits(rows * heads, width * query.element_size()):
        raise ValueError(mailbox.too_large(query))
    out = query.new_empty(rows, mailbox.size * heads, width)
    if rows * heads:
        _gather_heads[grid(rows * heads)](
            query,
            out,
            mailbox.bases,
            mailbox.calls,
            mailbox.lost,
            rows * heads,
            heads,
            *query.stride(),
            mailbox.polls,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            **constants(mailbox, query, rows * heads),
        )
    return out
