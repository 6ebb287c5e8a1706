# SPDX-License-Identifier: Apache-2.0
"""The short-convolution windows of a recurrent layer: each row's input behind the ``width - 1`` inputs before it.

Shapes: x ``[T, C, 1]`` pre-convolution inputs of T = B * S rows, request-major; conv_state ``[N, C, width - 1]`` the last
inputs of N state slots (oldest first); state_slots ``[B]`` int32 (-1 = padded request: zero history, nothing stored);
positions ``[B, S]`` (-1 = padded row, its input counts as 0). The padded rows of a request come before its first token or
after its last one. Result: ``[T, C, width]``, so that a causal convolution of each window ends in the row's output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import define, fake, reference
from .slots import check_pending, commit_slots, gather_slots

define("conv_window(Tensor x, Tensor(a!) conv_state, Tensor state_slots, Tensor positions) -> Tensor")
define(
    "conv_window_verify(Tensor x, Tensor(a!) conv_state, Tensor(b!) pending, Tensor accepted, Tensor state_slots, "
    "Tensor positions) -> Tensor"
)


def _valid_inputs(x: Tensor, positions: Tensor) -> Tensor:
    """Inputs by request ``[B, C, S]``, those of padded rows 0."""
    batch, rows = positions.shape
    by_request = x.reshape(batch, rows, x.shape[1]).transpose(1, 2)
    return torch.where((positions >= 0)[:, None, :], by_request, 0.0)


def _windows(sequence: Tensor, rows: int) -> Tensor:
    """The last ``rows`` windows of ``sequence [B, C, width - 1 + rows]``, as ``[B * rows, C, width]``."""
    batch, channels, length = sequence.shape
    width = length - rows + 1
    if rows == 0:  # not even one window fits then
        return sequence.new_empty(0, channels, width)
    return sequence.unfold(2, width, 1).transpose(1, 2).reshape(batch * rows, channels, width).contiguous()


def _columns(window: Tensor, first: Tensor, count: int) -> Tensor:
    """``count`` columns of ``window [B, C, L]`` from column ``first[b]`` on."""
    index = first[:, None] + torch.arange(count, device=window.device)
    return window.gather(2, index[:, None, :].expand(-1, window.shape[1], -1))


def rows_to_last_valid(positions: Tensor) -> Tensor:
    """Rows up to and including the last valid one, per request: ``[B]`` int64 (0 when all rows are padded)."""
    counted = torch.arange(1, positions.shape[1] + 1, device=positions.device)
    return (
        torch.where(positions >= 0, counted, 0).amax(dim=1)
        if positions.shape[1]
        else positions.new_zeros(len(positions))
    )


@reference("conv_window")
def conv_window(x: Tensor, conv_state: Tensor, state_slots: Tensor, positions: Tensor) -> Tensor:
    """The windows; afterwards conv_state holds the last ``width - 1`` inputs up to the last valid row."""
    inputs = _valid_inputs(x, positions)
    sequence = torch.cat([gather_slots(conv_state, state_slots).to(x.dtype), inputs], dim=-1)
    commit_slots(conv_state, state_slots, _columns(sequence, rows_to_last_valid(positions), conv_state.shape[2]))
    return _windows(sequence, positions.shape[1])


@reference("conv_window_verify")
def conv_window_verify(
    x: Tensor, conv_state: Tensor, pending: Tensor, accepted: Tensor, state_slots: Tensor, positions: Tensor
) -> Tensor:
    """Commit ``accepted[b]`` pending inputs, then return the windows of this step's inputs, leaving them pending.

    Args:
        pending: ``[N, C, M]`` inputs of the previous verify step; M bounds the rows of a verify step.
        accepted: ``[B]`` int32, how many of them are kept.
    """
    check_pending(positions.shape[1], pending.shape[2])
    held = torch.cat([gather_slots(conv_state, state_slots), gather_slots(pending, state_slots)], dim=-1)
    history = _columns(held, accepted.long(), conv_state.shape[2])
    commit_slots(conv_state, state_slots, history)
    inputs = _valid_inputs(x, positions)
    stored = torch.zeros((len(positions), *pending.shape[1:]), dtype=pending.dtype, device=pending.device)
    stored[:, :, : inputs.shape[2]] = inputs
    commit_slots(pending, state_slots, stored)
    return _windows(torch.cat([history.to(x.dtype), inputs], dim=-1), positions.shape[1])


@fake("conv_window")
def _(x, conv_state, state_slots, positions):
    return x.new_empty(x.shape[0], x.shape[1], conv_state.shape[2] + 1)


@fake("conv_window_verify")
def _(x, conv_state, pending, accepted, state_slots, positions):
    return x.new_empty(x.shape[0], x.shape[1], conv_state.shape[2] + 1)
