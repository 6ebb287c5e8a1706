# SPDX-License-Identifier: Apache-2.0
"""The short-convolution window of a recurrent layer: its cached history followed by this step's inputs.

Shapes: x ``[B, C, S]`` pre-convolution inputs, conv_state ``[N, C, width - 1]`` the last inputs of N state slots (oldest
first), state_slots ``[B]`` int32 (-1 = padded request: zero history, nothing stored), positions ``[B, S]`` (-1 = padded
row). The padded rows of a request come before its first token or after its last one. Result: ``[B, C, width - 1 + S]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import define, fake, reference
from .slots import commit_slots, gather_slots

define("conv_window(Tensor x, Tensor(a!) conv_state, Tensor state_slots, Tensor positions) -> Tensor")
define(
    "conv_window_verify(Tensor x, Tensor(a!) conv_state, Tensor(b!) pending, Tensor accepted, Tensor state_slots, "
    "Tensor positions) -> Tensor"
)


def _columns(window: Tensor, first: Tensor, count: int) -> Tensor:
    """``count`` columns of ``window [B, C, L]`` from column ``first[b]`` on."""
    index = first[:, None] + torch.arange(count, device=window.device)
    return window.gather(2, index[:, None, :].expand(-1, window.shape[1], -1))


def rows_to_last_valid(positions: Tensor) -> Tensor:
    """Rows up to and including the last valid one, per request: ``[B]`` int64 (0 when all rows are padded)."""
    counted = torch.arange(1, positions.shape[1] + 1, device=positions.device)
    return torch.where(positions >= 0, counted, 0).amax(dim=1) if positions.shape[1] else positions.new_zeros(len(positions))


@reference("conv_window")
def conv_window(x: Tensor, conv_state: Tensor, state_slots: Tensor, positions: Tensor) -> Tensor:
    """The window; afterwards conv_state holds the last ``width - 1`` inputs up to the last valid row."""
    history = gather_slots(conv_state, state_slots)
    inputs = torch.where((positions >= 0)[:, None, :], x, 0.0)
    window = torch.cat([history.to(x.dtype), inputs], dim=-1)
    commit_slots(conv_state, state_slots, _columns(window, rows_to_last_valid(positions), conv_state.shape[2]))
    return window


@reference("conv_window_verify")
def conv_window_verify(
    x: Tensor, conv_state: Tensor, pending: Tensor, accepted: Tensor, state_slots: Tensor, positions: Tensor
) -> Tensor:
    """Commit ``accepted[b]`` pending inputs, then return the window of this step's inputs, leaving them pending.

    Args:
        pending: ``[N, C, M]`` inputs of the previous verify step; M bounds the rows of a verify step.
        accepted: ``[B]`` int32, how many of them are kept.
    """
    held = torch.cat([gather_slots(conv_state, state_slots), gather_slots(pending, state_slots)], dim=-1)
    history = _columns(held, accepted.long(), conv_state.shape[2])
    commit_slots(conv_state, state_slots, history)
    inputs = torch.where((positions >= 0)[:, None, :], x, 0.0)
    stored = torch.zeros((x.shape[0], *pending.shape[1:]), dtype=pending.dtype, device=pending.device)
    stored[:, :, : x.shape[2]] = inputs
    commit_slots(pending, state_slots, stored)
    return torch.cat([history.to(x.dtype), inputs], dim=-1)


@fake("conv_window")
def _(x, conv_state, state_slots, positions):
    return x.new_empty(x.shape[0], x.shape[1], conv_state.shape[2] + x.shape[2])


@fake("conv_window_verify")
def _(x, conv_state, pending, accepted, state_slots, positions):
    return x.new_empty(x.shape[0], x.shape[1], conv_state.shape[2] + x.shape[2])
