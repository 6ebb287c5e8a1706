# SPDX-License-Identifier: Apache-2.0
"""Cache writes against a loop; what is not written keeps its poison."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_compile.layout import PAD_SLOT
from tests.cases import between, examples, generators, normal, strided

kv_write = torch.ops.dcp.kv_write


@examples(80)
@given(generator=generators(), rows=st.integers(0, 9), spread=st.booleans())
def test_each_row_lands_in_its_slot(generator: torch.Generator, rows: int, spread: bool) -> None:
    pages, block, latent_dim, rope_dim = (between(generator, low, 5) for low in (2, 1, 1, 1))
    slots = torch.randperm(pages * block, generator=generator)[:rows]
    rows = len(slots)
    slots = torch.where(torch.rand(rows, generator=generator) < 0.3, PAD_SLOT, slots)
    latent, rope = normal(generator, rows, latent_dim), normal(generator, rows, rope_dim)
    cache = torch.full((pages, block, latent_dim + rope_dim), torch.nan, dtype=torch.float64)
    wanted = cache.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted[slot // block, slot % block, :latent_dim] = latent[row]
            wanted[slot // block, slot % block, latent_dim:] = rope[row]
    if spread:
        latent, rope, slots = strided(latent), strided(rope), strided(slots)
    kv_write(latent, rope, cache, slots)
    assert torch.equal(cache.nan_to_num(1e9), wanted.nan_to_num(1e9))


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_rows_are_stored_in_the_type_of_the_cache(cache_dtype: torch.dtype) -> None:
    latent, rope = torch.tensor([[1.5, -2.0]]), torch.tensor([[0.25]])
    cache = torch.zeros(2, 2, 3, dtype=cache_dtype)
    kv_write(latent, rope, cache, torch.tensor([3]))
    assert cache.float()[1, 1].tolist() == [1.5, -2.0, 0.25]
    assert cache.float().abs().sum() == 3.75


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.25, 3])
def test_a_float8_cache_stores_quotients_and_saturates(dtype: torch.dtype, scale: float) -> None:
    """To the nearest of 3 bits of mantissa, ties to even; no finite or infinite value becomes NaN."""
    stored = [1.0, 1.0625, 1.1875, -448.0, 447.0, 480.0, 1e9, -torch.inf, 2.0**-9, 2.0**-11, torch.nan]
    values = (torch.tensor([stored], dtype=torch.float64) * scale).to(dtype)
    cache = torch.zeros(2, 2, 11, dtype=torch.float8_e4m3fn)
    kv_write(values[:, :8], values[:, 8:], cache, torch.tensor([3]), scale)
    found = cache[1, 1].float().nan_to_num(1000).tolist()
    assert found == [1.0, 1.0, 1.25, -448.0, 448.0, 448.0, 448.0, -448.0, 2.0**-9, 0.0, 1000.0]


def test_other_caches_have_no_scale() -> None:
    cache = torch.zeros(2, 2, 3)
    kv_write(torch.tensor([[1e6, -2.0]]), torch.tensor([[0.25]]), cache, torch.tensor([3]), 4.0)
    assert cache[1, 1].tolist() == [1e6, -2.0, 0.25]


def test_padding_rows_do_not_reach_the_last_slot() -> None:
    """-1 would be a valid index: the last row of the last page."""
    cache = torch.zeros(5, 16, 3)
    cache.view(-1, 3)[79] = 7.0
    kv_write(torch.ones(2, 2), torch.ones(2, 1), cache, torch.tensor([0, PAD_SLOT]))
    assert cache.view(-1, 3)[79].tolist() == [7.0] * 3
    assert cache.view(-1, 3)[0].tolist() == [1.0] * 3


def test_each_rank_stores_its_own_tokens_and_no_others() -> None:
    """Four tokens on four ranks: every rank is given all rows."""
    positions, table = torch.arange(4)[None], torch.tensor([[1]], dtype=torch.int32)
    for rank in range(4):
        slots = torch.ops.dcp.cp_local_slot(positions, table, 1, rank, 4, 1)
        cache = torch.zeros(2, 1, 2)
        kv_write(torch.arange(1.0, 5.0)[:, None], torch.zeros(4, 1), cache, slots)
        assert cache[:, 0, 0].tolist() == [0.0, rank + 1.0]
