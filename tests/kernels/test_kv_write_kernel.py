# SPDX-License-Identifier: Apache-2.0
"""kv_write: every row to its slot, nothing anywhere else."""

from __future__ import annotations

import math
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
    """-1 must not be taken as the last slot. A rank writes its own row only."""
    cache = torch.full((5, 16, 6), 7.0, device=device)
    rows = torch.zeros(2, 6, device=device)
    kv_write(rows[:, :4], rows[:, 4:], cache, torch.tensor([0, -1], device=device))
    assert (cache[0, 0] == 0).all() and (cache.view(-1, 6)[1:] == 7).all()

    cache = torch.full((2, 4, 6), 7.0, device=device)
    latent = torch.arange(4.0, device=device)[:, None].expand(4, 4)
    kv_write(latent, torch.zeros(4, 2, device=device), cache, torch.tensor([-1, 0, -1, -1]).to(device))
    assert cache[0, 0].tolist() == [1, 1, 1, 1, 0, 0] and (cache.view(-1, 6)[1:] == 7).all()


@pytest.mark.seeds(6)
@pytest.mark.parametrize("dtype", FLOATS)
def test_float8_cache(draw: random.Random, device: str, dtype: torch.dtype) -> None:
    """Exactly the reference: rounding to nearest, values around zero and out of range, infinities and NaN."""
    scale, latent = draw.choice([1.0, 0.125, 0.3, 2.7, 4]), draw.choice([24, 30, 1])
    values = torch.randn(6, 30) * 2.0 ** torch.randint(-14, 9, (6, 30))
    values[0, :5] = torch.tensor([1e4, -1e4, math.nan, math.inf, -math.inf])
    values = values.to(dtype)
    slots = torch.tensor([4, 11, -1, 6, 7, 8])
    cache = torch.full((3, 4, 30), 7.0).to(torch.float8_e4m3fn)
    want, cache = cache.clone(), cache.to(device)
    rows = values[:, :latent], values[:, latent:]
    reference.kv_write(*rows, want, slots, scale)
    kv_write(*(row.to(device) for row in rows), cache, slots.to(device), scale)
    stored, want = cache.cpu().float().nan_to_num(1000), want.float().nan_to_num(1000)
    assert torch.equal(stored, want)
    assert stored.view(-1, 30)[4, :5].tolist() == [448, -448, 1000, 448, -448]


@pytest.mark.gpu
def test_large_pool() -> None:
    """Slots past 2**31 elements."""
    cache = torch.zeros(70000, 64, 576, dtype=torch.bfloat16, device="cuda")
    latent = torch.randn(2, 512, device="cuda").bfloat16()
    rope = torch.randn(2, 64, device="cuda").bfloat16()
    slots = torch.tensor([69999 * 64 + 63, 64 * 60000], device="cuda")
    kv_write(latent, rope, cache, slots)
    assert torch.equal(cache.view(-1, 576)[slots], torch.cat([latent, rope], -1))
