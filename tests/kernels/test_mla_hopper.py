# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel against dense float64 attention: on the GPU it is made for, else in the model of Gluon."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import ModuleType

import pytest
import simulated_gluon
import torch
from kernel_inputs import shuffled_tables
from simulated_gluon import load_simulated
from torch import Tensor

from dcp_compile.errors import BackendError
from dcp_compile.kernels.device import hopper_unavailable
from dcp_compile.ops import merge, mla

UNAVAILABLE = hopper_unavailable(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
SCALE = 192**-0.5
TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 3e-2}


def _reference_merge(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    merged, merged_lse = merge.merge_partials(outs, lses)
    out.copy_(merged)
    lse.copy_(merged_lse)


def _reference_merge_pieces(outs: Tensor, lses: Tensor, parts: Tensor, out: Tensor, lse: Tensor) -> None:
    rows = outs.shape[1]
    for request, (first, count) in enumerate(parts.tolist()):
        if count > 1:
            here, own = slice(request * rows, (request + 1) * rows), slice(first, first + count)
            _reference_merge(outs[own], lses[own], out[here], lse[here])


@pytest.fixture(scope="module")
def hopper() -> ModuleType:
    if UNAVAILABLE is None:
        from dcp_compile.kernels import mla_hopper

        return mla_hopper
    module = load_simulated(Path(__file__).parents[2] / "kernels" / "mla_hopper.py", "dcp_compile.kernels")
    module.merge_into = _reference_merge  # the interpreter takes minutes for the kernels at these sizes
    module.merge_pieces = _reference_merge_pieces
    return module


@pytest.fixture
def device() -> str:
    return "cuda" if UNAVAILABLE is None else "cpu"


def make_cache(draw: random.Random, lengths: list[int], page: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cache and block table; what no key was written to is NaN, pages of other layers in between too."""
    columns = [-(-length // page) for length in lengths]
    table, pages = shuffled_tables(draw, columns, max(columns) + draw.randint(1, 2))
    pool = torch.full((pages, draw.choice([1, 2]), page, 576), math.nan, dtype=dtype)
    cache = pool[:, -1]
    for request, length in enumerate(lengths):
        for column in range(columns[request]):
            count = min(page, length - column * page)
            cache[table[request, column], :count] = torch.randn(count, 576).to(dtype)
    return pool, table


def check(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    out, lse = got[0].cpu(), got[1].cpu()
    assert out.dtype == dtype and lse.dtype == torch.float32
    empty = want[1] == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert (out[empty] == 0).all()
    torch.testing.assert_close(out.double(), want[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), want[1], rtol=1e-3, atol=1e-3)


def random_lengths(draw: random.Random, batch: int) -> list[int]:
    longest = 4000 if UNAVAILABLE is None else 400
    return [draw.choice([0, 1, 63, 64, 65, 127, 128, draw.randint(0, longest)]) for _ in range(batch)]


@pytest.mark.seeds(10)
def test_rows(draw: random.Random, device: str, hopper: ModuleType) -> None:
    """Any head count, bounds that differ between the rows of a request, rows that see nothing and hold NaN."""
    batch, width, heads = draw.choice([1, 2, 3]), draw.choice([1, 2, 5]), draw.choice([1, 3, 12, 40, 96])
    dtype = draw.choice([torch.float16, torch.bfloat16])
    lengths = random_lengths(draw, batch)
    pool, table = make_cache(draw, lengths, draw.choice([64, 128]), dtype)
    requests = torch.arange(batch, dtype=torch.int32).repeat_interleave(width)
    bounds = [draw.choice([0, lengths[r], max(lengths[r] - 1, 0), draw.randint(0, lengths[r])]) for r in requests]
    bounds = torch.tensor(bounds, dtype=torch.int32)
    query = torch.randn(batch * width, heads, 576).to(dtype)
    exact = query[..., :512].double(), query[..., 512:].double(), pool[:, -1].double(), table
    want = mla.attend_rows(*exact, requests, bounds, SCALE)
    query[bounds == 0] = math.nan
    query = query.to(device)
    if draw.random() < 0.3:  # rows and heads that TMA cannot walk: copied by the launcher
        query = query.transpose(0, 1).contiguous().transpose(0, 1)
    got = hopper.mla_rows(
        query[..., :512], query[..., 512:], pool.to(device)[:, -1], table.to(device), requests.to(device),
        bounds.to(device), SCALE, splits=draw.choice([None, 1, 2, 3, 7]),
    )  # fmt: skip
    check(got, want, dtype)


@pytest.mark.skipif(UNAVAILABLE is None, reason="a test of the barriers in the model of Gluon")
def test_no_partition_overtakes_a_slow_one(hopper: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them by more than a block takes the others; seven blocks, of which the last is not full."""
    monkeypatch.setattr(simulated_gluon, "SLOW", 2e-2)
    query, cache = torch.randn(1, 12, 576).half(), torch.randn(8, 64, 576).half()
    table, bounds = torch.arange(1, 8, dtype=torch.int32)[None], torch.tensor([425], dtype=torch.int32)
    requests = torch.zeros(1, dtype=torch.int32)
    exact = query[..., :512].double(), query[..., 512:].double(), cache.double(), table
    want = mla.attend_rows(*exact, requests, bounds, SCALE)
    for _ in range(5):  # four partitions, and none
        operands = (query[..., :512], query[..., 512:], cache, table, requests, bounds, SCALE)
        check(hopper.mla_rows(*operands, splits=1), want, torch.float16)


@pytest.mark.seeds(6)
def test_prefix(draw: random.Random, device: str, hopper: ModuleType) -> None:
    batch, width, heads = draw.choice([1, 3]), draw.choice([1, 4]), draw.choice([12, 20])
    dtype = draw.choice([torch.float16, torch.bfloat16])
    lengths = random_lengths(draw, batch)
    pool, table = make_cache(draw, lengths, 64, dtype)
    bounds = torch.tensor([draw.choice([length, draw.randint(0, length)]) for length in lengths], dtype=torch.int32)
    query = torch.randn(batch * width, heads, 576).to(dtype)
    args = query[..., :512], query[..., 512:], pool[:, -1], table
    want = mla.attend_prefix(*(t.double() for t in args[:3]), table, bounds, SCALE)
    got = hopper.mla_prefix(
        *(t.to(device) for t in args), bounds.to(device), SCALE, splits=draw.choice([None, 1, 2, 5])
    )
    check(got, want, dtype)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 129, 191, 192, 193, 256, 257])
def test_every_end_of_a_split(device: str, hopper: ModuleType, length: int) -> None:
    """Odd and even numbers of blocks, whole and partial last blocks, up to more splits than blocks."""
    draw = random.Random(length)
    torch.manual_seed(length)
    pool, table = make_cache(draw, [length], 64, torch.float16)
    query = torch.randn(2, 3, 576).half()
    requests, bounds = torch.zeros(2, dtype=torch.int32), torch.tensor([length, max(length - 1, 0)], dtype=torch.int32)
    args = query[..., :512], query[..., 512:], pool[:, -1], table, requests, bounds
    want = mla.attend_rows(*(t.double() for t in args[:3]), *args[3:], SCALE)
    for splits in range(1, 7):
        check(hopper.mla_rows(*(t.to(device) for t in args), SCALE, splits=splits), want, torch.float16)


def test_nothing_to_do(device: str, hopper: ModuleType) -> None:
    query, cache = torch.zeros(0, 3, 576, device=device).half(), torch.zeros(2, 64, 576, device=device).half()
    table, none = torch.zeros(0, 1, dtype=torch.int32, device=device), torch.zeros(0, dtype=torch.int32, device=device)
    out, lse = hopper.mla_rows(query[..., :512], query[..., 512:], cache, table, none, none, SCALE)
    assert out.shape == (0, 3, 512) and lse.shape == (0, 3)


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(latent=256), "latent 256 and rope 64: this kernel is for 512 and 64"),
        (dict(page=48), "block_size 48 is not a multiple of 64"),
        (dict(dtype=torch.float32), "both must be bfloat16 or both float16"),
        (dict(rows=3), "3 rows for 2 requests: every request must have the same number"),
        (dict(batch=0), "2 rows for 0 requests: every request must have the same number"),
        (dict(line=580), "lines must be dense, 16-byte aligned"),
    ],
)
def test_refusals(hopper: ModuleType, change: dict, message: str) -> None:
    case = dict(latent=512, page=64, dtype=torch.float16, rows=2, batch=2, line=None) | change
    latent, rows = case["latent"], case["rows"]
    query = torch.zeros(rows, 3, latent + 64, dtype=case["dtype"])
    cache = torch.zeros(2, case["page"], case["line"] or latent + 64, dtype=case["dtype"])[..., : latent + 64]
    table, per_row = torch.zeros(case["batch"], 1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    with pytest.raises(BackendError, match=message):
        hopper.mla_rows(query[..., :latent], query[..., latent:], cache, table, per_row, per_row, SCALE)


def test_reason_on_other_devices() -> None:
    assert hopper_unavailable(torch.device("cpu")) == "device cpu is not a CUDA device"


@pytest.mark.gpu
@pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))
@pytest.mark.parametrize("width", [1, 8])
def test_captured_call_follows_device_bounds(hopper: ModuleType, width: int) -> None:
    """Bounds change between replays, over more splits than some of them fill."""
    draw = random.Random(width)
    torch.manual_seed(width)
    lengths = [3000, 700]
    pool, table = make_cache(draw, lengths, 64, torch.bfloat16)
    query = torch.randn(2 * width, 96, 576).bfloat16()
    requests = torch.arange(2, dtype=torch.int32).repeat_interleave(width)
    args = query[..., :512], query[..., 512:], pool[:, -1], table
    on_gpu = [t.cuda() for t in (*args, requests)]
    bounds = torch.zeros(2 * width, dtype=torch.int32, device="cuda")
    hopper.mla_rows(*on_gpu, bounds, SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = hopper.mla_rows(*on_gpu, bounds, SCALE)
    for _ in range(6):
        new = torch.tensor([draw.randint(0, lengths[r]) for r in requests.tolist()], dtype=torch.int32)
        bounds.copy_(new)
        captured[0].fill_(math.nan)
        captured[1].fill_(math.nan)
        graph.replay()
        want = mla.attend_rows(*(t.double() for t in args[:3]), table, requests, new, SCALE)
        check(captured, want, torch.bfloat16)
