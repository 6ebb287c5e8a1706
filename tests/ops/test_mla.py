# SPDX-License-Identifier: Apache-2.0
"""Partial attention over shards, split or not, against dense attention; unwritten cache rows are NaN throughout."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_compile.errors import BackendError
from dcp_compile.ops.merge import merge_partials
from tests.cases import Sharding, between, examples, generators, shardings
from tests.ops.sequences import random_sequences, sequences_of

dcp = torch.ops.dcp


def close(found, wanted, tolerance: float = 1e-12) -> None:
    for one, other in zip(found, wanted):
        assert one.shape == other.shape
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)


def merged(parts) -> tuple[torch.Tensor, torch.Tensor]:
    outs, lses = zip(*parts)
    return merge_partials(torch.stack(outs), torch.stack(lses))


@examples(60)
@given(generator=generators(), sharding=shardings(4), batch=st.integers(0, 3), rows=st.integers(0, 4))
def test_shards_merge_to_dense_attention(generator, sharding: Sharding, batch: int, rows: int) -> None:
    case = random_sequences(generator, sharding, batch, rows)
    close(merged([case.rows(rank) for rank in range(sharding.dcp_size)]), case.dense())


@examples(60)
@given(generator=generators(), sharding=shardings(4), batch=st.integers(0, 3), rows=st.integers(0, 4), data=st.data())
def test_prefix_and_tail_make_up_the_whole(generator, sharding: Sharding, batch: int, rows: int, data) -> None:
    """The prefix may be any number of tokens that were final before the step: stale, current, or none."""
    case = random_sequences(generator, sharding, batch, rows)
    stale = [data.draw(st.integers(0, count)) for count in case.before]
    lengths = torch.tensor(stale, dtype=torch.int64)
    everything = []
    for rank in range(sharding.dcp_size):
        prefix, tail = case.prefix(rank, lengths), case.tail(rank, lengths)
        whole = merged([prefix, tail])
        valid = (case.positions.flatten() >= 0)[:, None]  # a padded row reads the prefix, and nobody reads the row
        close([torch.where(valid[..., None], whole[0], 0), torch.where(valid, whole[1], -math.inf)], case.rows(rank))
        everything += [prefix, tail]
    close([value[case.positions.flatten() >= 0] for value in merged(everything)],
          [value[case.positions.flatten() >= 0] for value in case.dense()])  # fmt: skip
    if sharding.dcp_size == 1:
        close(case.prefix(0, lengths), case.dense(last=stale))
        close(case.tail(0, lengths), case.dense(first=stale))


@pytest.mark.parametrize("sharding", [Sharding(2, 1, 2), Sharding(3, 2, 2), Sharding(4, 3, 3)])
def test_every_short_length_merges_to_dense_attention(sharding: Sharding) -> None:
    """From no token at all over fewer tokens than ranks to two full rounds."""
    generator = torch.Generator().manual_seed(0)
    for length in range(2 * sharding.dcp_size * sharding.interleave + 1):
        case = sequences_of(generator, sharding, [max(length - 1, 0)], [min(length, 1)], 1)
        close(merged([case.rows(rank) for rank in range(sharding.dcp_size)]), case.dense())


def test_a_row_may_be_empty_where_its_request_is_not() -> None:
    """Three tokens and a verify block of eight on 16 ranks: the eighth rank holds one key, of the fifth row."""
    case = sequences_of(torch.Generator().manual_seed(3), Sharding(16, 1, 1), [3], [8], 8)
    out, lse = case.rows(7)
    assert torch.equal(out[:4], torch.zeros_like(out[:4]))
    assert torch.equal(lse[:4], torch.full_like(lse[:4], -math.inf))
    assert torch.isfinite(lse[4:]).all()
    torch.testing.assert_close(out[4:], case.keys[0][7, : case.latent].expand_as(out[4:]))
    close(merged([case.rows(rank) for rank in range(16)]), case.dense())


def test_a_short_request_beside_a_longer_one() -> None:
    """Local lengths 0 and 3 on this rank: the empty request is 0 and -inf, the other is masked row by row."""
    generator = torch.Generator().manual_seed(5)
    q_latent, q_rope = torch.randn(10, 2, 3, generator=generator), torch.randn(10, 2, 1, generator=generator)
    cache = torch.full((2, 4, 4), torch.nan)
    cache[1, :3] = torch.randn(3, 4, generator=generator)
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    requests = torch.tensor([0] * 5 + [1] * 5, dtype=torch.int32)
    bounds = torch.tensor([0] * 5 + [1, 1, 2, 2, 3], dtype=torch.int32)
    out, lse = dcp.mla_rows(q_latent, q_rope, cache, table, requests, bounds, 0.5, "torch")
    assert torch.equal(out[:5], torch.zeros(5, 2, 3)) and (lse[:5] == -math.inf).all()
    for row, bound in zip(range(5, 10), [1, 1, 2, 2, 3]):
        keys = cache[1, :bound]
        scores = torch.einsum("hd,ld->hl", torch.cat([q_latent, q_rope], -1)[row], keys) * 0.5
        torch.testing.assert_close(lse[row], scores.logsumexp(-1))
        torch.testing.assert_close(out[row], scores.softmax(-1) @ keys[:, :3])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_lower_precisions_accumulate_in_float32(dtype: torch.dtype, tolerance: float) -> None:
    case = random_sequences(torch.Generator().manual_seed(1), Sharding(2, 1, 2), 3, 4, dtype)
    found = merged([case.rows(rank) for rank in range(2)])
    assert found[0].dtype == dtype and found[1].dtype == torch.float32
    close(found, case.dense(), tolerance)


def test_an_eight_bit_cache_is_read() -> None:
    case = random_sequences(torch.Generator().manual_seed(2), Sharding(1, 1, 4), 2, 3, torch.float32)
    case.caches = [cache.to(torch.float8_e4m3fn) for cache in case.caches]
    case.keys = [keys.to(torch.float8_e4m3fn) for keys in case.keys]
    close(case.rows(0), case.dense(), 1e-5)


@pytest.mark.parametrize("scale", [0.5, 3])
def test_values_of_the_cache_are_scaled_when_they_are_read(scale: float) -> None:
    case = random_sequences(torch.Generator().manual_seed(4), Sharding(1, 1, 4), 2, 3, torch.float32)
    cache, scaled = case.caches[0].to(torch.float8_e4m3fn), case.caches[0].to(torch.float8_e4m3fn).float() * scale
    requests, bounds = dcp.row_requests(case.positions), dcp.row_bounds(case.positions, 0, 1, 1)
    prefix = dcp.prefix_bounds(torch.tensor(case.before) // 2, 0, 1, 1)
    for call, lengths in (
        (dcp.mla_rows, (requests, bounds)), (dcp.mla_prefix, (prefix,)), (dcp.mla_tail, (requests, prefix, bounds)),
    ):  # fmt: skip
        found = call(*case.queries, cache, case.table, *lengths, case.scale, "torch", scale)
        close(found, call(*case.queries, scaled, case.table, *lengths, case.scale, "torch"), 1e-6)


@examples(30)
@given(generator=generators())
def test_strides_of_the_operands_do_not_matter(generator) -> None:
    case = random_sequences(generator, Sharding(2, 1, 2), 2, 3)
    wanted = case.rows(1)
    case.query = case.query.transpose(0, 2).contiguous().transpose(0, 2)
    case.caches = [cache.transpose(0, 2).contiguous().transpose(0, 2) for cache in case.caches]
    case.table = case.table.t().contiguous().t()
    found = case.rows(1)
    close(found, wanted)
    assert all(value.is_contiguous() for value in found)


def test_query_heads_may_be_more_than_one_ranks() -> None:
    """Outputs are sized by the queries given, gathered heads included."""
    q_latent, q_rope = torch.randn(32, 4 * 8, 16), torch.randn(32, 4 * 8, 4)
    table, requests = torch.ones(1, 1, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    out, lse = dcp.mla_rows(q_latent, q_rope, torch.zeros(2, 1, 20), table, requests, requests + 1, 1.0, "torch")
    assert out.shape == (32, 32, 16) and lse.shape == (32, 32)


def test_pages_are_read_in_table_order() -> None:
    """The second page of the table comes second, wherever it lies."""
    cache = torch.tensor([[[0.0]], [[20.0]], [[10.0]]]).repeat(1, 1, 2)
    query = torch.zeros(1, 1, 1)
    one, zero = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for table, first in (([2, 1], 10.0), ([1, 2], 20.0)):
        table = torch.tensor([table], dtype=torch.int32)
        assert dcp.mla_rows(query, query, cache, table, zero, one, 1.0, "torch")[0].item() == first
        assert dcp.mla_rows(query, query, cache, table, zero, 2 * one, 1.0, "torch")[0].item() == 15.0


def test_an_unknown_backend_is_named() -> None:
    case = random_sequences(torch.Generator().manual_seed(0), Sharding(1, 1, 1), 1, 1)
    with pytest.raises(BackendError, match="unknown attention backend 'trtllm'; known backends: .*torch"):
        case.rows(0, backend="trtllm")


@examples(10)
@given(generator=generators())
def test_a_split_row_is_the_same_on_every_choice_of_prefix(generator) -> None:
    """Planning with lengths that are several steps old changes nothing but rounding."""
    sharding = Sharding(between(generator, 1, 3), 1, 2)
    case = sequences_of(generator, sharding, [6], [3], 3)
    found = []
    for length in range(7):
        lengths = torch.tensor([length])
        parts = [
            part for rank in range(sharding.dcp_size) for part in (case.prefix(rank, lengths), case.tail(rank, lengths))
        ]
        found.append(merged(parts))
    for other in found[1:]:
        close(other, found[0])
