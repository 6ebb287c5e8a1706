# SPDX-License-Identifier: Apache-2.0
"""The short-convolution windows of a recurrent layer: each row's input behind the inputs before it, cached ones too."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dcp_compile.ops.slots import check_pending


@triton.jit
def _inputs(x_column, positions, row, rows, row_stride, position_stride, live):
    """Inputs ``[channels, len(row)]`` of the step; 0 in padded rows and outside ``[0, rows)``."""
    position = tl.load(positions + row * position_stride, mask=(row >= 0) & (row < rows), other=-1)
    return tl.load(x_column + row.to(tl.int64)[None, :] * row_stride, mask=live & (position >= 0)[None, :], other=0.0)


@triton.jit
def _history(
    held, record, column, kept, held_stride, record_stride, live, HISTORY: tl.constexpr, RECORDS: tl.constexpr
):
    """Columns ``[channels, len(column)]`` of the history after ``kept`` of the recorded inputs moved into it."""
    source = column + kept
    past = (column < HISTORY) & (source < HISTORY)
    value = tl.load(held + source[None, :] * held_stride, mask=live & past[None, :], other=0.0)
    if RECORDS > 0:
        moved = (column < HISTORY) & (source >= HISTORY)
        recent = tl.load(record + (source - HISTORY)[None, :] * record_stride, mask=live & moved[None, :], other=0.0)
        value = tl.where(past[None, :], value, recent.to(value.dtype))
    return value


@triton.jit(do_not_specialize=["rows"])
def _conv_window(
    x,
    conv_state,
    pending,
    accepted,
    state_slots,
    positions,
    out,
    rows,  # per request
    channels,
    x_stride_t,
    x_stride_c,
    state_stride_n,
    state_stride_c,
    state_stride_w,
    pending_stride_n,
    pending_stride_c,
    pending_stride_m,
    accepted_stride,
    slot_stride,
    position_stride_b,
    position_stride_s,
    HISTORY: tl.constexpr,
    RECORDS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_RECORDS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    channel = (tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    request = tl.program_id(2).to(tl.int64)
    slot = tl.load(state_slots + request * slot_stride).to(tl.int64)
    live = (channel < channels)[:, None]
    stored = live & (slot >= 0)
    x_column = x + request * rows * x_stride_t + channel[:, None] * x_stride_c
    held = conv_state + slot * state_stride_n + channel[:, None] * state_stride_c
    positions += request * position_stride_b
    record = held
    kept = 0
    if RECORDS > 0:
        record = pending + slot * pending_stride_n + channel[:, None] * pending_stride_c
        kept = tl.minimum(tl.maximum(tl.load(accepted + request * accepted_stride), 0), RECORDS)

    # The windows of a block of rows: row s sees columns [s, s + HISTORY] of the history followed by the inputs.
    n = tl.arange(0, BLOCK_S * BLOCK_W)
    row = tl.program_id(1) * BLOCK_S + n // BLOCK_W
    tap = n % BLOCK_W
    column = row + tap
    value = _inputs(x_column, positions, column - HISTORY, rows, x_stride_t, position_stride_s, live)
    past = _history(held, record, column, kept, state_stride_w, pending_stride_m, stored, HISTORY, RECORDS)
    value = tl.where((column < HISTORY)[None, :], past.to(value.dtype), value)
    target = out + ((request * rows + row)[None, :] * channels + channel[:, None]) * (HISTORY + 1) + tap[None, :]
    tl.store(target, value, mask=live & ((row < rows) & (tap <= HISTORY))[None, :])

    # Only the first block of rows reads the history, so it is the one to replace it.
    if tl.program_id(1) == 0:
        end = 0  # rows that are final: none of those that stay pending, else all up to the last valid one
        if RECORDS == 0:
            for first in range(0, rows, BLOCK_S):
                s = first + tl.arange(0, BLOCK_S)
                position = tl.load(positions + s * position_stride_s, mask=s < rows, other=-1)
                end = tl.maximum(end, tl.max(tl.where(position >= 0, s + 1, 0), 0))
        last = tl.arange(0, BLOCK_W)
        source = end + last
        fresh = _inputs(x_column, positions, source - HISTORY, rows, x_stride_t, position_stride_s, live)
        older = _history(held, record, source, kept, state_stride_w, pending_stride_m, stored, HISTORY, RECORDS)
        newest = tl.where((source < HISTORY)[None, :], older, fresh.to(older.dtype))
        tl.debug_barrier()  # columns move: every thread has read history and records before any of them is replaced
        tl.store(held + last[None, :] * state_stride_w, newest, mask=stored & (last < HISTORY)[None, :])
        if RECORDS > 0:
            m = tl.arange(0, BLOCK_RECORDS)
            left = _inputs(x_column, positions, m, rows, x_stride_t, position_stride_s, live)
            left = left.to(pending.dtype.element_ty)
            tl.store(record + m[None, :] * pending_stride_m, left, mask=stored & (m < RECORDS)[None, :])


def _launch(
    x: Tensor,
    conv_state: Tensor,
    pending: Tensor | None,
    accepted: Tensor | None,
    state_slots: Tensor,
    positions: Tensor,
) -> Tensor:
    batch, rows = positions.shape
    channels, history = x.shape[1], conv_state.shape[2]
    records = 0 if pending is None else pending.shape[2]
    out = x.new_empty((batch * rows, channels, history + 1))
    if batch * channels == 0 or (rows == 0 and pending is None):
        return out
    # The first block of rows holds all windows that reach into the history.
    block_s = triton.next_power_of_2(max(min(rows, max(history, 16)), 1))
    block_w = triton.next_power_of_2(history + 1)
    block_c = max(16, 1024 // (block_s * block_w))
    _conv_window[(triton.cdiv(channels, block_c), max(triton.cdiv(rows, block_s), 1), batch)](
        x,
        conv_state,
        pending,
        accepted,
        state_slots,
        positions,
        out,
        rows,
        channels,
        x.stride(0),
        x.stride(1),
        *conv_state.stride(),
        *((0, 0, 0) if pending is None else pending.stride()),
        0 if accepted is None else accepted.stride(0),
        state_slots.stride(0),
        *positions.stride(),
        HISTORY=history,
        RECORDS=records,
        BLOCK_W=block_w,
        BLOCK_RECORDS=triton.next_power_of_2(max(records, 1)),
        BLOCK_C=block_c,
        BLOCK_S=block_s,
        num_warps=4,
    )
    return out


def conv_window(x: Tensor, conv_state: Tensor, state_slots: Tensor, positions: Tensor) -> Tensor:
    """Launcher of ``dcp::conv_window``.

    Args:
        x: ``[B * S, C, 1]``. conv_state: ``[N, C, width - 1]``, oldest first; afterwards the last inputs up to the last
            valid row. state_slots: ``[B]``, -1 = padded request. positions: ``[B, S]``, -1 = padded row. Any strides;
            slots of one call must differ.

    Returns:
        ``[B * S, C, width]`` in the dtype of x: each row's input behind the ``width - 1`` before it. The history of a
        padded request is 0, and so is the input of a padded row.
    """
    return _launch(x, conv_state, None, None, state_slots, positions)


def conv_window_verify(
    x: Tensor, conv_state: Tensor, pending: Tensor, accepted: Tensor, state_slots: Tensor, positions: Tensor
) -> Tensor:
    """Launcher of ``dcp::conv_window_verify``; shapes as in :func:`conv_window`, and:

    Args:
        pending: ``[N, C, M]`` inputs of the previous verify step, replaced by the S <= M inputs of this one (zeros
            after them and in padded rows).
        accepted: ``[B]`` int32 in ``[0, M]``: pending inputs that are first shifted into conv_state.

    Raises:
        CapacityError: S > M.
    """
    check_pending(positions.shape[1], pending.shape[2])
    return _launch(x, conv_state, pending, accepted, state_slots, positions)
