# SPDX-License-Identifier: Apache-2.0
"""conv_window and conv_window_verify: bit-equal to the reference."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_inputs import step_positions, strided

from dcp_compile.errors import CapacityError
from dcp_compile.kernels.conv import conv_window, conv_window_verify
from dcp_compile.ops import conv as reference

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])


def make_slots(draw: random.Random, batch: int, pool: int) -> torch.Tensor:
    """Distinct state slots, some of them -1."""
    slots = [n if draw.random() < 0.8 else -1 for n in draw.sample(range(pool), batch)]
    return torch.tensor(slots, dtype=torch.int32)


def inputs_of(positions: torch.Tensor, channels: int, dtype: torch.dtype) -> torch.Tensor:
    """Inputs ``[B * S, C, 1]``, NaN in padded rows."""
    x = torch.randn(positions.numel(), channels, 1).to(dtype)
    return x.masked_fill((positions.reshape(-1) < 0)[:, None, None], float("nan"))


@pytest.mark.seeds(25)
def test_window(draw: random.Random, device: str) -> None:
    batch, channels, rows = draw.choice([0, 1, 3]), draw.choice([1, 5, 70]), draw.choice([0, 1, 2, 7, 40])
    history, dtype, pool = draw.choice([0, 1, 3, 4]), draw.choice(DTYPES), batch + 2
    state = torch.randn(pool, channels, history).to(dtype)
    positions = step_positions(draw, batch, rows, 200)
    x = inputs_of(positions, channels, dtype)
    slots = make_slots(draw, batch, pool)
    want_state = state.clone()
    want = reference.conv_window(x, want_state, slots, positions)
    x, mine, slots, positions = (strided(t.to(device), draw) for t in (x, state, slots, positions))
    got = conv_window(x, mine, slots, positions)
    assert torch.equal(got.cpu(), want) and got.is_contiguous()
    assert torch.equal(mine.cpu(), want_state)


@pytest.mark.seeds(25)
def test_window_verify(draw: random.Random, device: str) -> None:
    """Three verify steps in a row."""
    batch, channels, records = draw.choice([0, 1, 3]), draw.choice([1, 5, 70]), draw.choice([1, 4, 8, 20])
    history, dtype, pool = draw.choice([0, 1, 3, 4]), draw.choice(DTYPES), batch + 2
    pools = [torch.randn(pool, channels, n).to(dtype) for n in (history, records)]
    mine = [strided(t.clone().to(device), draw) for t in pools]
    slots = make_slots(draw, batch, pool)
    for _ in range(3):
        rows = draw.randint(0, records)
        positions = step_positions(draw, batch, rows, 50)
        x = inputs_of(positions, channels, dtype)
        accepted = torch.tensor([draw.randint(0, records) for _ in range(batch)], dtype=torch.int32)
        want = reference.conv_window_verify(x, *pools, accepted, slots, positions)
        moved = [strided(t.to(device), draw) for t in (x, accepted, slots, positions)]
        got = conv_window_verify(moved[0], *mine, *moved[1:])
        assert torch.equal(got.cpu(), want)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(mine, pools))


def test_rejecting_drafts_restores_the_window(device: str) -> None:
    """Inputs 1..7, a verify step of 8..11, one accepted: the window is 6, 7, 8."""
    state = torch.tensor([[[5.0, 6, 7]]], device=device)
    pending = torch.zeros(1, 1, 4, device=device)
    slots, none = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    x = torch.tensor([8.0, 9, 10, 11], device=device)[:, None, None]
    positions = torch.arange(7, 11, device=device)[None]
    windows = conv_window_verify(x, state, pending, none, slots, positions)
    assert windows.tolist() == [[[5, 6, 7, 8]], [[6, 7, 8, 9]], [[7, 8, 9, 10]], [[8, 9, 10, 11]]]
    assert state.tolist() == [[[5, 6, 7]]]
    windows = conv_window_verify(x[:1] + 1, state, pending, none + 1, slots, positions[:, :1])
    assert windows.tolist() == [[[6, 7, 8, 9]]] and state.tolist() == [[[6, 7, 8]]]


def test_more_rows_than_records(device: str) -> None:
    x, state = torch.zeros(3, 1, 1, device=device), torch.zeros(1, 1, 3, device=device)
    one = torch.zeros(1, dtype=torch.int32, device=device)
    positions = torch.zeros(1, 3, dtype=torch.int64, device=device)
    with pytest.raises(CapacityError, match="3 rows per request does not fit: at most 2 may stay pending"):
        conv_window_verify(x, state, state[..., :2], one, one, positions)
