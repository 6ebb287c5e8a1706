# SPDX-License-Identifier: Apache-2.0
"""The short-convolution window of a recurrent layer: cached history and this step's inputs, side by side."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dcp_compile.errors import CapacityError


@triton.jit
def _inputs(x_row, positions, column, rows, stride, position_stride, live):
    """Inputs ``[channels, columns]`` of the step; 0 in padded rows and outside ``[0, rows)``."""
    known = (column >= 0) & (column < rows)
    position = tl.load(positions + column * position_stride, mask=known, other=-1)
    return tl.load(x_row + column.to(tl.int64)[None, :] * stride, mask=live & (position >= 0)[None, :], other=0.0)


@triton.jit(do_not_specialize=["rows"])
def _conv_window(
    x,
    conv_state,
    state_slots,
    positions,
    out,
    rows,
    channels,
    x_stride_b,
    x_stride_c,
    x_stride_s,
    state_stride_n,
    state_stride_c,
    state_stride_w,
    slot_stride,
    position_stride_b,
    position_stride_s,
    HISTORY: tl.constexpr,
    BLOCK_HISTORY: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    channel = (tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    request = tl.program_id(1).to(tl.int64)
    slot = tl.load(state_slots + request * slot_stride).to(tl.int64)
    live = (channel < channels)[:, None]
    x_row = x + request * x_stride_b + channel[:, None] * x_stride_c
    held = conv_state + slot * state_stride_n + channel[:, None] * state_stride_c
    positions += request * position_stride_b
    length = HISTORY + rows
    out_row = out + (request * channels + channel[:, None]) * length

    end = 0  # rows up to and including the last valid one
    for first in range(0, length, BLOCK_S):
        column = first + tl.arange(0, BLOCK_S)
        past = tl.load(
            held + column[None, :] * state_stride_w, mask=live & (column < HISTORY)[None, :] & (slot >= 0), other=0.0
        ).to(out.dtype.element_ty)
        row = column - HISTORY
        value = _inputs(x_row, positions, row, rows, x_stride_s, position_stride_s, live)
        value = tl.where((column < HISTORY)[None, :], past, value.to(out.dtype.element_ty))
        tl.store(out_row + column[None, :], value, mask=live & (column < length)[None, :])
        position = tl.load(positions + row * position_stride_s, mask=(row >= 0) & (row < rows), other=-1)
        end = tl.maximum(end, tl.max(tl.where(position >= 0, row + 1, 0), 0))

    last = tl.arange(0, BLOCK_HISTORY)
    column = end + last
    past = tl.load(
        held + column[None, :] * state_stride_w, mask=live & (column < HISTORY)[None, :] & (slot >= 0), other=0.0
    )
    value = _inputs(x_row, positions, column - HISTORY, rows, x_stride_s, position_stride_s, live)
    value = tl.where((column < HISTORY)[None, :], past, value.to(past.dtype))
    tl.debug_barrier()  # columns move: every thread has read the history before any of it is replaced
    tl.store(held + last[None, :] * state_stride_w, value, mask=live & (last < HISTORY)[None, :] & (slot >= 0))


@triton.jit(do_not_specialize=["rows"])
def _conv_window_verify(
    x,
    conv_state,
    pending,
    accepted,
    state_slots,
    positions,
    out,
    rows,
    channels,
    x_stride_b,
    x_stride_c,
    x_stride_s,
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
    BLOCK_HISTORY: tl.constexpr,
    BLOCK_RECORDS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    channel = (tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    request = tl.program_id(1).to(tl.int64)
    slot = tl.load(state_slots + request * slot_stride).to(tl.int64)
    live = (channel < channels)[:, None]
    held_live = live & (slot >= 0)
    held = conv_state + slot * state_stride_n + channel[:, None] * state_stride_c
    record = pending + slot * pending_stride_n + channel[:, None] * pending_stride_c
    out_row = out + (request * channels + channel[:, None]) * (HISTORY + rows)
    kept = tl.minimum(tl.maximum(tl.load(accepted + request * accepted_stride), 0), RECORDS)

    last = tl.arange(0, BLOCK_HISTORY)
    column = kept + last  # of the history followed by the records
    past = tl.load(held + column[None, :] * state_stride_w, mask=held_live & (column < HISTORY)[None, :], other=0.0)
    row = column - HISTORY
    taken = tl.load(
        record + row[None, :] * pending_stride_m, mask=held_live & ((row >= 0) & (row < RECORDS))[None, :], other=0.0
    )
    history = tl.where((column < HISTORY)[None, :], past, taken.to(past.dtype))
    tl.debug_barrier()  # columns move: every thread has read history and records before any of them is replaced
    tl.store(held + last[None, :] * state_stride_w, history, mask=held_live & (last < HISTORY)[None, :])
    tl.store(out_row + last[None, :], history.to(out.dtype.element_ty), mask=live & (last < HISTORY)[None, :])

    row = tl.arange(0, BLOCK_RECORDS)
    value = _inputs(
        x + request * x_stride_b + channel[:, None] * x_stride_c,
        positions + request * position_stride_b,
        row,
        rows,
        x_stride_s,
        position_stride_s,
        live,
    )
    tl.store(out_row + (HISTORY + row)[None, :], value.to(out.dtype.element_ty), mask=live & (row < rows)[None, :])
    value = value.to(pending.dtype.element_ty)
    tl.store(record + row[None, :] * pending_stride_m, value, mask=held_live & (row < RECORDS)[None, :])


def conv_window(x: Tensor, conv_state: Tensor, state_slots: Tensor, positions: Tensor) -> Tensor:
    """Launcher of ``dcp::conv_window``.

    Args:
        x: ``[B, C, S]``. conv_state: ``[N, C, width - 1]``, oldest first; afterwards the last inputs up to the last valid
            row. state_slots: ``[B]``, -1 = padded request. positions: ``[B, S]``, -1 = padded row. Any strides; slots of
            one call must differ.

    Returns:
        ``[B, C, width - 1 + S]`` in the dtype of x: history (zeros for a padded request), then x, zero in padded rows.
    """
    batch, channels, rows = x.shape
    history = conv_state.shape[2]
    out = x.new_empty((batch, channels, history + rows))
    if out.numel() == 0:
        return out
    block_s = min(64, triton.next_power_of_2(history + rows))
    block_c = max(16, 1024 // block_s)
    _conv_window[(triton.cdiv(channels, block_c), batch)](
        x,
        conv_state,
        state_slots,
        positions,
        out,
        rows,
        channels,
        *x.stride(),
        *conv_state.stride(),
        state_slots.stride(0),
        *positions.stride(),
        HISTORY=history,
        BLOCK_HISTORY=triton.next_power_of_2(max(history, 1)),
        BLOCK_C=block_c,
        BLOCK_S=block_s,
        num_warps=4,
    )
    return out


def conv_window_verify(
    x: Tensor, conv_state: Tensor, pending: Tensor, accepted: Tensor, state_slots: Tensor, positions: Tensor
) -> Tensor:
    """Launcher of ``dcp::conv_window_verify``; shapes as in :func:`conv_window`, and:

    Args:
        pending: ``[N, C, M]`` inputs of the previous verify step, replaced by the S <= M inputs of this one (zeros after
            them and in padded rows).
        accepted: ``[B]`` int32 in ``[0, M]``: pending inputs that are first shifted into conv_state.

    Raises:
        CapacityError: S > M.
    """
    batch, channels, rows = x.shape
    history, records = conv_state.shape[2], pending.shape[2]
    if rows > records:
        raise CapacityError(
            f"a verify step of {rows} rows does not fit into the {records} records of a state slot; "
            "allocate the records for the widest verify step"
        )
    out = x.new_empty((batch, channels, history + rows))
    if batch * channels == 0:
        return out
    _conv_window_verify[(triton.cdiv(channels, 128), batch)](
        x,
        conv_state,
        pending,
        accepted,
        state_slots,
        positions,
        out,
        rows,
        channels,
        *x.stride(),
        *conv_state.stride(),
        *pending.stride(),
        accepted.stride(0),
        state_slots.stride(0),
        *positions.stride(),
        HISTORY=history,
        RECORDS=records,
        BLOCK_HISTORY=triton.next_power_of_2(max(history, 1)),
        BLOCK_RECORDS=triton.next_power_of_2(max(records, 1)),
        BLOCK_C=128,
        num_warps=4,
    )
    return out
