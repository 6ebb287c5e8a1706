# SPDX-License-Identifier: Apache-2.0
"""conv_window and conv_window_verify: bit-equal to the reference.

The kernels return each request's sequence, history first; the operators cut it into one window per row.
"""

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


def by_row(x: torch.Tensor) -> torch.Tensor:
    """Inputs ``[B, C, S]`` as the operators take them: ``[B * S, C, 1]``."""
    batch, channels, rows = x.shape
    return x.transpose(1, 2).reshape(batch * rows, channels, 1)


def windows(sequence: torch.Tensor, rows: int) -> torch.Tensor:
    """``[B, C, width - 1 + S]`` -> ``[B * S, C, width]``."""
    batch, channels, length = sequence.shape
    width = length - rows + 1
    if rows == 0:
        return sequence.new_empty(0, channels, width)
    return sequence.unfold(2, width, 1).transpose(1, 2).reshape(batch * rows, channels, width)


@pytest.mark.seeds(25)
def test_window(draw: random.Random, device: str) -> None:
    batch, channels, rows = draw.choice([0, 1, 3]), draw.choice([1, 5, 150]), draw.choice([0, 1, 2, 7, 90])
    history, dtype, pool = draw.choice([0, 1, 3, 4]), draw.choice(DTYPES), batch + 2
    state = torch.randn(pool, channels, history).to(dtype)
    positions = step_positions(draw, batch, rows, 200)
    x = torch.randn(batch, channels, rows).to(dtype)
    x.masked_fill_((positions < 0)[:, None], float("nan"))
    slots = make_slots(draw, batch, pool)
    want_state = state.clone()
    want = reference.conv_window(by_row(x), want_state, slots, positions)
    x, mine, slots, positions = (strided(t.to(device), draw) for t in (x, state, slots, positions))
    got = conv_window(x, mine, slots, positions)
    assert torch.equal(windows(got.cpu(), rows), want) and got.is_contiguous()
    assert torch.equal(mine.cpu(), want_state)


@pytest.mark.seeds(25)
def test_window_verify(draw: random.Random, device: str) -> None:
    """Three verify steps in a row."""
    batch, channels, records = draw.choice([0, 1, 3]), draw.choice([1, 5, 150]), draw.choice([1, 4, 8])
    history, dtype, pool = draw.choice([0, 1, 3, 4]), draw.choice(DTYPES), batch + 2
    pools = [torch.randn(pool, channels, n).to(dtype) for n in (history, records)]
    mine = [strided(t.clone().to(device), draw) for t in pools]
    slots = make_slots(draw, batch, pool)
    for _ in range(3):
        rows = draw.randint(0, records)
        positions = step_positions(draw, batch, rows, 50)
        x = torch.randn(batch, channels, rows).to(dtype)
        x.masked_fill_((positions < 0)[:, None], float("nan"))
        accepted = torch.tensor([draw.randint(0, records) for _ in range(batch)], dtype=torch.int32)
        want = reference.conv_window_verify(by_row(x), *pools, accepted, slots, positions)
        moved = [strided(t.to(device), draw) for t in (x, accepted, slots, positions)]
        got = conv_window_verify(moved[0], *mine, *moved[1:])
        assert torch.equal(windows(got.cpu(), rows), want)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(mine, pools))


def test_rejecting_drafts_restores_the_window(device: str) -> None:
    """BC53: inputs 1..7, a verify step of 8..11, one accepted: the window is 6, 7, 8."""
    state = torch.tensor([[[5.0, 6, 7]]], device=device)
    pending = torch.zeros(1, 1, 4, device=device)
    slots, none = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    x, positions = torch.tensor([[[8.0, 9, 10, 11]]], device=device), torch.arange(7, 11, device=device)[None]
    window = conv_window_verify(x, state, pending, none, slots, positions)
    assert window.tolist() == [[[5, 6, 7, 8, 9, 10, 11]]] and state.tolist() == [[[5, 6, 7]]]
    window = conv_window_verify(x[..., :0], state, pending, none + 1, slots, positions[:, :0])
    assert window.tolist() == state.tolist() == [[[6, 7, 8]]]


def test_more_rows_than_records(device: str) -> None:
    zeros = torch.zeros(1, 1, 3, device=device)
    one = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(CapacityError, match="3 rows does not fit into the 2 records"):
        conv_window_verify(zeros, zeros, zeros[..., :2], one, one, torch.zeros(1, 3, dtype=torch.int64, device=device))
