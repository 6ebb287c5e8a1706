# SPDX-License-Identifier: Apache-2.0
"""kv_write: every row to its slot, nothing anywhere else."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_inputs import strided

from dcp_compile.kernels.kv_write import kv_write
from dcp_compile.ops import kv_write as reference

FLOATS = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])


@pytest.mark.seeds(30)
def test_equals_reference(draw: random.Random, device: str) -> None:
    rows, latent, rope = draw.choice([0, 1, 7]), draw.choice([1, 8, 24, 64]), draw.choice([0, 1, 6, 16])
    pages, block_size = draw.randint(2, 5), draw.choice([1, 4, 16])
    dtype, cache_dtype = draw.choice(FLOATS), draw.choice(FLOATS)
    cache = torch.randn(pages, block_size, latent + rope).to(cache_dtype)
    slots = torch.tensor(draw.sample(range(block_size, pages * block_size), min(rows, (pages - 1) * block_size)))
    slots = torch.cat([slots, torch.full((rows - len(slots),), -1)]).long()
    slots[torch.rand(rows) < 0.3] = -1
    latents, ropes = torch.randn(rows, latent).to(dtype), torch.randn(rows, rope).to(dtype)
    latents[slots < 0] = float("nan")
    want = cache.clone()
    reference.kv_write(latents, ropes, want, slots)

    # The pool of this layer may be a part of a larger one.
    pool = torch.full((pages, 3, block_size, latent + rope), float("nan"), dtype=cache_dtype, device=device)
    pool[:, 1] = cache.to(device)
    latents, ropes, slots = (strided(t.to(device), draw) for t in (latents, ropes, slots))
    kv_write(latents, ropes, pool[:, 1], slots)
    assert torch.equal(pool[:, 1].cpu(), want)
    assert pool[:, [0, 2]].isnan().all()


def test_padding_rows_touch_no_slot(device: str) -> None:
    """BC17: -1 must not be taken as the last slot. BC13: a rank writes its own row only."""
    cache = torch.full((5, 16, 6), 7.0, device=device)
    rows = torch.zeros(2, 6, device=device)
    kv_write(rows[:, :4], rows[:, 4:], cache, torch.tensor([0, -1], device=device))
    assert (cache[0, 0] == 0).all() and (cache.view(-1, 6)[1:] == 7).all()

    cache = torch.full((2, 4, 6), 7.0, device=device)
    latent = torch.arange(4.0, device=device)[:, None].expand(4, 4)
    kv_write(latent, torch.zeros(4, 2, device=device), cache, torch.tensor([-1, 0, -1, -1]).to(device))
    assert cache[0, 0].tolist() == [1, 1, 1, 1, 0, 0] and (cache.view(-1, 6)[1:] == 7).all()


def check_float8(values, scale, slots, latent, device):
    """``values [T, latent + rope]`` arrive at ``slots`` as the nearest float8 of ``value / scale``."""
    cache = torch.zeros(3, 4, values.shape[1]).to(torch.float8_e4m3fn).to(device)
    kv_scale = None if scale is None else torch.tensor([scale], device=device)
    kv_write(values[:, :latent].to(device), values[:, latent:].to(device), cache, slots.to(device), kv_scale)
    want = (values * (1 / torch.tensor(scale or 1.0))).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    stored = cache.cpu().view(-1, values.shape[1]).float()
    assert torch.equal(stored[slots[slots >= 0]].nan_to_num(9e9), want[slots >= 0].nan_to_num(9e9))
    untouched = torch.ones(len(stored), dtype=torch.bool)
    untouched[slots[slots >= 0]] = False
    assert (stored[untouched] == 0).all()


@pytest.mark.seeds(5)
@pytest.mark.parametrize("scale", [None, 0.125, 4.0])
def test_float8_cache(draw: random.Random, device: str, scale: float | None) -> None:
    """Values that need no rounding (the interpreter rounds wrongly), and values out of range."""
    values = (torch.randn(6, 30) * 50).to(torch.float8_e4m3fn).float() * (scale or 1.0)
    values[0, :2] = torch.tensor([1e6, -1e6])
    check_float8(values, scale, torch.tensor([4, 11, -1, 6, 7, 8]), draw.choice([24, 30, 1]), device)


@pytest.mark.gpu
@pytest.mark.seeds(5)
def test_float8_rounding(draw: random.Random) -> None:
    values = torch.randn(6, 30) * 50
    values[0, :3] = torch.tensor([1e6, -1e6, float("nan")])
    check_float8(values, draw.choice([None, 0.3, 2.7]), torch.tensor([4, 11, -1, 6, 7, 8]), 24, "cuda")


@pytest.mark.gpu
def test_large_pool() -> None:
    """Slots past 2**31 elements."""
    cache = torch.zeros(70000, 64, 576, dtype=torch.bfloat16, device="cuda")
    latent = torch.randn(2, 512, device="cuda").bfloat16()
    rope = torch.randn(2, 64, device="cuda").bfloat16()
    slots = torch.tensor([69999 * 64 + 63, 64 * 60000], device="cuda")
    kv_write(latent, rope, cache, slots)
    assert torch.equal(cache.view(-1, 576)[slots], torch.cat([latent, rope], -1))
