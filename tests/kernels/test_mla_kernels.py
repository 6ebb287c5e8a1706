# SPDX-License-Identifier: Apache-2.0
"""mla_rows, mla_prefix and mla_tail against dense float64 attention."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from kernel_inputs import shuffled_tables, strided
from torch import Tensor

from dcp_compile import layout
from dcp_compile.kernels.mla_rows import mla_prefix, mla_rows
from dcp_compile.kernels.mla_tail import mla_tail
from dcp_compile.ops import merge, mla

GPU = torch.cuda.is_available()
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
HEADS = [1, 3, 12, 48, 96] if GPU else [1, 2, 3, 6]  # the interpreter is slow; test_96_heads has one case for it
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if GPU else [])  # the interpreter's bfloat16 is wrong


@dataclass(frozen=True)
class Call:
    q_latent: Tensor
    q_rope: Tensor
    kv_cache: Tensor
    block_table: Tensor
    lengths: list[int]  # keys written per request
    scale: float

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return tuple(t.to(device) for t in (self.q_latent, self.q_rope, self.kv_cache, self.block_table))

    def exact(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q_latent.double(), self.q_rope.double(), self.kv_cache.double(), self.block_table


def make_call(draw: random.Random, batch: int, rows: int, heads: int, dtype: torch.dtype, longest: int = 70) -> Call:
    latent, rope, block_size = draw.choice([8, 16, 24]), draw.choice([0, 4, 6, 16]), draw.choice([1, 4, 16, 64])
    lengths = [draw.choice([0, 1, draw.randint(0, longest)]) for _ in range(batch)]
    columns = [-(-length // block_size) for length in lengths]
    table, pages = shuffled_tables(draw, columns, max(columns, default=0) + draw.randint(1, 2))
    cache = torch.full((pages, block_size, latent + rope), math.nan, dtype=dtype)
    for request, length in enumerate(lengths):
        for key in range(length):
            cache[table[request, key // block_size], key % block_size] = torch.randn(latent + rope).to(dtype)
    query = torch.randn(rows, heads, latent + rope).to(dtype)
    if draw.random() < 0.5:  # both halves of one gathered tensor
        q_latent, q_rope = query[..., :latent], query[..., latent:]
    else:
        q_latent, q_rope = strided(query[..., :latent], draw), strided(query[..., latent:], draw)
    return Call(q_latent, q_rope, cache, strided(table, draw), lengths, (latent + rope) ** -0.5)


def check(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    out, lse = got[0].cpu(), got[1].cpu()
    assert out.dtype == dtype and lse.dtype == torch.float32
    empty = want[1] == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert (out[empty] == 0).all()
    torch.testing.assert_close(out.double(), want[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), want[1], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def split_choice(draw: random.Random) -> int | None:
    return draw.choice([None, 1, 2, 5])


@pytest.mark.seeds(30)
def test_rows(draw: random.Random, device: str) -> None:
    """Any row -> request map: uniform, ragged, or without order; bounds of a row may be 0."""
    batch, width, heads = draw.choice([1, 2, 3]), draw.choice([1, 2, 4]), draw.choice(HEADS)
    kind = draw.choice(["uniform", "ragged", "any"])
    requests = [request for request in range(batch) for _ in range(width)]
    if kind == "ragged":
        requests = [request for request in range(batch) for _ in range(draw.randint(0, width + 2))]
    if kind == "any":
        draw.shuffle(requests)
    dtype = draw.choice(DTYPES)
    call = make_call(draw, batch, len(requests), heads, dtype)
    bounds = [draw.choice([0, call.lengths[r], draw.randint(0, call.lengths[r])]) for r in requests]
    requests, bounds = (torch.tensor(values, dtype=torch.int32) for values in (requests, bounds))
    got = mla_rows(
        *call.inputs(device), requests.to(device), bounds.to(device), call.scale, splits=split_choice(draw)
    )
    check(got, mla.attend_rows(*call.exact(), requests, bounds, call.scale), dtype)


@pytest.mark.seeds(15)
def test_prefix(draw: random.Random, device: str) -> None:
    batch, width, heads = draw.choice([1, 2, 3]), draw.choice([0, 1, 2, 4]), draw.choice(HEADS)
    dtype = draw.choice(DTYPES)
    call = make_call(draw, batch, batch * width, heads, dtype)
    bounds = torch.tensor([draw.randint(0, length) for length in call.lengths], dtype=torch.int32)
    got = mla_prefix(*call.inputs(device), bounds.to(device), call.scale, splits=split_choice(draw))
    check(got, mla.attend_prefix(*call.exact(), bounds, call.scale), dtype)


@pytest.mark.seeds(20)
def test_tail(monkeypatch, draw: random.Random, device: str) -> None:
    monkeypatch.setattr("dcp_compile.kernels.device.multiprocessors", lambda _: 132)
    batch, width, heads = draw.choice([1, 2, 3]), draw.choice([1, 2, 4]), draw.choice(HEADS)
    dtype = draw.choice(DTYPES)
    call = make_call(draw, batch, batch * width, heads, dtype)
    starts = torch.tensor([draw.randint(0, length) for length in call.lengths], dtype=torch.int32)
    requests = torch.arange(batch, dtype=torch.int32).repeat_interleave(width)
    bounds = torch.tensor([draw.randint(0, call.lengths[r]) for r in requests.tolist()], dtype=torch.int32)
    keys = draw.choice([0, 200, 1000])  # many: split among programs
    got = mla_tail(
        *call.inputs(device), requests.to(device), starts.to(device), bounds.to(device), call.scale, keys=keys
    )
    check(got, mla.attend_tail(*call.exact(), requests, starts, bounds, call.scale), dtype)


@pytest.mark.parametrize("keys", [0, 1000])
def test_keys_before_the_tail_are_not_read(device: str, keys: int) -> None:
    """What was never written there may be NaN, in the block where the tail starts as well."""
    query, cache = torch.randn(1, 3, 48), torch.full((2, 64, 48), math.nan)
    cache[1, 20:40] = torch.randn(20, 48)
    table, requests = torch.ones(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    starts, bounds = torch.tensor([20], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    metadata = table, requests, starts, bounds
    call = query[..., :32], query[..., 32:], cache
    got = mla_tail(*(t.to(device) for t in (*call, *metadata)), 0.3, keys=keys)
    want = mla.attend_tail(*(t.nan_to_num().double() for t in call), *metadata, 0.3)
    check(got, want, torch.float32)


@pytest.mark.seeds(1)
def test_96_heads(draw: random.Random, device: str) -> None:
    """96 heads fill one and a half tiles of 64; rows of a request share tiles."""
    call = make_call(draw, 1, 2, 96, torch.float32, longest=20)
    requests = torch.zeros(2, dtype=torch.int32)
    bounds = torch.tensor([draw.randint(0, call.lengths[r]) for r in requests.tolist()], dtype=torch.int32)
    got = mla_rows(*call.inputs(device), requests.to(device), bounds.to(device), call.scale, splits=2)
    check(got, mla.attend_rows(*call.exact(), requests, bounds, call.scale), torch.float32)


@pytest.mark.parametrize("batch,rows,heads", [(0, 0, 3), (1, 0, 3), (2, 2, 0)])
def test_nothing_to_do(device: str, batch: int, rows: int, heads: int) -> None:
    q_latent, q_rope = torch.zeros(rows, heads, 8, device=device), torch.zeros(rows, heads, 4, device=device)
    cache, table = torch.zeros(2, 4, 12, device=device), torch.zeros(batch, 1, dtype=torch.int32, device=device)
    requests = torch.zeros(rows, dtype=torch.int32, device=device)
    out, lse = mla_rows(q_latent, q_rope, cache, table, requests, requests, 1.0)
    assert out.shape == (rows, heads, 8) and lse.shape == (rows, heads)


@pytest.mark.seeds(10)
def test_sharded_prefix_and_tail_make_dense_attention(draw: random.Random, device: str) -> None:
    """Every rank's split parts, merged, are the attention over all keys, for any D, I, q, and stale prefix."""
    dcp_size, block_size = draw.choice([1, 2, 3, 8]), draw.choice([1, 4, 16])
    interleave = draw.choice([i for i in (1, 4, 16) if block_size % i == 0])
    width, heads, latent, rope = draw.choice([1, 3, 8]), draw.choice([1, 2]), 16, 4
    length = width + draw.randint(0, 2 * dcp_size * interleave + 5)
    prefix = draw.randint(0, length - width)
    keys, query = torch.randn(length, latent + rope), torch.randn(width, heads, latent + rope)
    positions = torch.arange(length - width, length)

    scores = torch.einsum("the,le->thl", query.double(), keys.double()) * 0.3
    scores = scores.masked_fill(torch.arange(length) > positions[:, None, None], -math.inf)
    want = torch.softmax(scores, -1) @ keys[:, :latent].double()

    outs, lses = [], []
    columns = layout.pages_needed(length, block_size, dcp_size)
    table = torch.tensor([draw.sample(range(1, columns + 3), columns)], dtype=torch.int32)
    requests = torch.zeros(width, dtype=torch.int32)
    for rank in range(dcp_size):
        cache = torch.full((columns + 3, block_size, latent + rope), math.nan)
        slots = layout.local_slot(torch.arange(length), table[0], block_size, rank, dcp_size, interleave)
        cache.view(-1, latent + rope)[slots[slots >= 0]] = keys[slots >= 0]
        bounds = layout.local_length(positions + 1, rank, dcp_size, interleave).int()
        start = torch.tensor([layout.local_length(prefix, rank, dcp_size, interleave)], dtype=torch.int32)
        args = [t.to(device) for t in (query[..., :latent], query[..., latent:], cache, table)]
        requests, bounds, start = requests.to(device), bounds.to(device), start.to(device)
        for part in (mla_prefix(*args, start, 0.3), mla_tail(*args, requests, start, bounds, 0.3)):
            outs.append(part[0].cpu())
            lses.append(part[1].cpu())
        whole = mla_rows(*args, requests, bounds, 0.3)
        halves = merge.merge_partials(torch.stack(outs[-2:]), torch.stack(lses[-2:]))
        torch.testing.assert_close(whole[0].cpu(), halves[0], rtol=1e-5, atol=1e-5)
    out, _ = merge.merge_partials(torch.stack(outs), torch.stack(lses))
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_row_level_empty_shard(device: str) -> None:
    """Rank 7 of 16 holds one key, which the first four rows of the verify block must not see."""
    torch.manual_seed(0)
    query, cache = torch.randn(8, 3, 20), torch.full((2, 16, 20), math.nan)
    cache[1, 0] = torch.randn(20)
    bounds = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1], dtype=torch.int32)
    requests, table = torch.zeros(8, dtype=torch.int32), torch.tensor([[1]], dtype=torch.int32)
    args = [t.to(device) for t in (query[..., :16], query[..., 16:], cache, table, requests, bounds)]
    out, lse = mla_rows(*args, 0.25)
    assert (out[:4] == 0).all() and (lse[:4] == -math.inf).all()
    torch.testing.assert_close(out[4:].cpu(), cache[1, 0, :16].expand(4, 3, 16), rtol=1e-5, atol=1e-5)


def test_empty_rank_of_a_ragged_batch(device: str) -> None:
    """Rows of a request without local keys stay at their places; rows of length 0 are never NaN."""
    torch.manual_seed(1)
    cache = torch.full((3, 4, 12), math.nan)
    cache[2, :3] = torch.randn(3, 12)
    query = torch.randn(7, 2, 12)
    table = torch.tensor([[0], [2]], dtype=torch.int32)
    requests = torch.tensor([0, 0, 1, 1, 1, 1, 1], dtype=torch.int32)
    bounds = torch.tensor([0, 0, 1, 1, 2, 2, 3], dtype=torch.int32)
    for splits in (1, 3):
        args = (query[..., :8], query[..., 8:], cache, table, requests, bounds)
        got = mla_rows(*(t.to(device) for t in args), 0.3, splits=splits)
        check(got, mla.attend_rows(*(t.double() for t in args[:3]), *args[3:], 0.3), torch.float32)
        assert (got[0][:2] == 0).all() and (got[1][:2] == -math.inf).all()


@pytest.mark.seeds(5)
def test_float8_cache(draw: random.Random, device: str) -> None:
    """A NaN in an unwritten row stays unseen; the scale counts for keys and for values."""
    dtype, scale = draw.choice(DTYPES), draw.choice([1.0, 0.5, 2.7, 4])
    call = make_call(draw, 2, 4, 3, dtype)
    cache = call.kv_cache.float().to(torch.float8_e4m3fn)
    assert cache.float().isnan().any()
    requests = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    bounds = torch.tensor([call.lengths[r] for r in requests.tolist()], dtype=torch.int32)
    starts = torch.tensor([draw.randint(0, length) for length in call.lengths], dtype=torch.int32)
    q_latent, q_rope, _, table = call.inputs(device)
    given = q_latent, q_rope, cache.to(device), table
    exact = call.q_latent.double(), call.q_rope.double(), cache.double(), call.block_table
    scaled = *exact[:2], cache.double() * scale, exact[3]
    splits = split_choice(draw)
    for kernel, attend, lengths in (
        (mla_rows, mla.attend_rows, (requests, bounds)),
        (mla_prefix, mla.attend_prefix, (starts,)),
        (mla_tail, mla.attend_tail, (requests, starts, bounds)),
    ):
        options = {} if kernel is mla_tail else {"splits": splits}
        got = kernel(*given, *(part.to(device) for part in lengths), call.scale, scale, **options)
        want = attend(*exact, *lengths, call.scale, scale)
        check(got, want, dtype)
        for one, other in zip(want, attend(*scaled, *lengths, call.scale)):
            torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.seeds(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_full_width(draw: random.Random, dtype: torch.dtype) -> None:
    """512 + 64 wide, 96 heads, every launch shape."""
    batch, width = draw.choice([(1, 1), (1, 8), (8, 1), (3, 4)])
    lengths = [draw.choice([0, 1, 63, 64, 65, draw.randint(0, 3000)]) for _ in range(batch)]
    table, pages = shuffled_tables(draw, [-(-length // 64) for length in lengths], 50)
    cache = torch.randn(pages, 64, 576).to(dtype)
    for request, length in enumerate(lengths):
        if length % 64:
            cache[table[request, length // 64], length % 64 :] = math.nan
    query = torch.randn(batch * width, 96, 576).to(dtype)
    requests = torch.arange(batch, dtype=torch.int32).repeat_interleave(width)
    bounds = torch.tensor([max(lengths[r] - draw.randint(0, 3), 0) for r in requests.tolist()], dtype=torch.int32)
    starts = torch.tensor([max(length - 60, 0) for length in lengths], dtype=torch.int32)
    args = (query[..., :512], query[..., 512:], cache, table)
    exact = (*(t.double() for t in args[:3]), table)
    on_gpu, scale = [t.cuda() for t in args], 192**-0.5
    got = mla_rows(*on_gpu, requests.cuda(), bounds.cuda(), scale)
    check(got, mla.attend_rows(*exact, requests, bounds, scale), dtype)
    got = mla_tail(*on_gpu, requests.cuda(), starts.cuda(), bounds.cuda(), scale)
    check(got, mla.attend_tail(*exact, requests, starts, bounds, scale), dtype)


@pytest.mark.gpu
@pytest.mark.seeds(3)
def test_captured_call_follows_device_bounds(draw: random.Random) -> None:
    """Bounds change between replays; no launch reads them on the host."""
    call = make_call(draw, 3, 6, 12, torch.float32)
    inputs = call.inputs("cuda")
    requests = torch.tensor([0, 0, 1, 1, 2, 2], dtype=torch.int32)
    bounds = torch.zeros(6, dtype=torch.int32, device="cuda")
    device_requests = requests.cuda()
    mla_rows(*inputs, device_requests, bounds, call.scale, splits=3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mla_rows(*inputs, device_requests, bounds, call.scale, splits=3)
    for _ in range(4):
        new = torch.tensor([draw.randint(0, call.lengths[r]) for r in requests.tolist()], dtype=torch.int32)
        bounds.copy_(new)
        captured[0].fill_(math.nan)
        captured[1].fill_(math.nan)
        graph.replay()
        check(captured, mla.attend_rows(*call.exact(), requests, new, call.scale), torch.float32)
