# SPDX-License-Identifier: Apache-2.0
"""kda and kda_verify against the reference in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kernel_inputs import step_positions, strided
from simulated_gluon import load_simulated
from torch import Tensor

from dcp_compile.errors import CapacityError
from dcp_compile.kernels import kda_verify_hopper
from dcp_compile.kernels.device import hopper_unavailable
from dcp_compile.kernels.kda import kda
from dcp_compile.kernels.kda_verify import kda_verify
from dcp_compile.ops import kda as reference

GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if GPU else [])
CLOSE = dict(rtol=2e-5, atol=2e-5)
OUT_CLOSE = {
    torch.float32: CLOSE,
    torch.float16: dict(rtol=2e-3, atol=2e-3),
    torch.bfloat16: dict(rtol=2e-2, atol=2e-2),
}


def keys(*shape: int) -> Tensor:
    """Keys of length about one, as the model's are: with longer ones each row would multiply the rounding of the last."""
    return torch.randn(shape) * shape[-1] ** -0.5


def records_of(pool: int, records: int, heads: int, width: int, values: int) -> list[Tensor]:
    """Pending keys, corrections and log decays."""
    corrections, decays = torch.randn(pool, records, heads, values), -torch.randn(pool, records, heads, width).abs()
    return [keys(pool, records, heads, width), corrections, decays]


def rows_of(positions: Tensor, heads: int, width: int, values: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v, g, beta of one step, with NaN in the padded rows."""
    batch, rows = positions.shape
    q, k = torch.randn(batch, rows, heads, width).to(dtype), keys(batch, rows, heads, width).to(dtype)
    v, g = torch.randn(batch, rows, heads, values).to(dtype), -5 * torch.rand(batch, rows, heads, width)
    beta = torch.rand(batch, rows, heads)
    padded = positions < 0
    for tensor in (q, k, v, g, beta):
        tensor[padded] = float("nan")
    return q, k, v, g, beta


def slots_of(draw: random.Random, batch: int, pool: int) -> Tensor:
    """Distinct state slots, some of them -1."""
    slots = [slot if draw.random() < 0.8 else -1 for slot in draw.sample(range(pool), batch)]
    return torch.tensor(slots, dtype=torch.int32)


def moved(draw: random.Random, device: str, *tensors: Tensor) -> list[Tensor]:
    """Copies on the device behind random strides (a kernel must not assume contiguous slots)."""
    return [strided(tensor.clone().to(device), draw) for tensor in tensors]


def dense_heads(draw: random.Random, device: str, *tensors: Tensor) -> list[Tensor]:
    """:func:`moved` with the numbers of a head next to each other."""

    def place(tensor: Tensor) -> Tensor:
        tensor = tensor.clone().to(device)
        if tensor.dim() < 3:
            return strided(tensor, draw)
        if draw.random() < 0.5:
            tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
        return torch.nn.functional.pad(tensor, (4, 4), value=float("nan"))[..., 4:-4]

    return [place(tensor) for tensor in tensors]


@pytest.mark.seeds(20)
def test_kda(draw: random.Random, device: str) -> None:
    batch, rows, heads = draw.choice([0, 1, 3]), draw.choice([0, 1, 2, 6]), draw.choice([1, 3, 12 if GPU else 2])
    width, values = draw.choice([1, 8, 12, 16]), draw.choice([1, 8, 20, 40])
    dtype, norm, pool = draw.choice(DTYPES), draw.random() < 0.5, batch + 2
    positions = step_positions(draw, batch, rows, 50)
    slots = slots_of(draw, batch, pool)
    inputs = rows_of(positions, heads, width, values, dtype)
    state = torch.randn(pool, heads, width, values)
    want_state = state.double()
    want = reference.kda(*(t.double() for t in inputs), want_state, slots, positions, 0.3, norm)

    mine = moved(draw, device, state)[0]
    got = kda(*moved(draw, device, *inputs), mine, *moved(draw, device, slots, positions), 0.3, norm)
    assert got.dtype == dtype
    torch.testing.assert_close(got.cpu().double(), want, **OUT_CLOSE[dtype])
    assert (got.cpu()[positions < 0] == 0).all()
    torch.testing.assert_close(mine.cpu().double(), want_state, **CLOSE)
    idle = [n for n in range(pool) if n not in slots.tolist()]
    idle += [slot for slot, row in zip(slots.tolist(), positions) if slot >= 0 and (row < 0).all()]
    assert torch.equal(mine.cpu()[idle], state[idle])


@pytest.fixture(scope="module")
def hopper() -> Callable[..., Tensor]:
    """The Hopper kernel's launcher: on the GPU it is made for, else in the model of Gluon."""
    if hopper_unavailable(torch.device("cuda" if GPU else "cpu")) is None:
        return kda_verify_hopper.kda_verify
    path = Path(__file__).parents[2] / "kernels" / "kda_verify_hopper.py"
    return load_simulated(path, "dcp_compile.kernels").kda_verify


@pytest.mark.seeds(20)
@pytest.mark.parametrize("kernel", ["portable", "hopper"])
def test_kda_verify(request, draw: random.Random, device: str, kernel: str) -> None:
    """Two verify steps in a row: what one leaves pending the next commits."""
    batch, heads, records = draw.choice([0, 1, 2]), draw.choice([1, 2]), draw.choice([1, 3, 5])
    width, values = draw.choice([1, 8, 12]), draw.choice([1, 8, 40])
    verify, move = kda_verify, moved
    if kernel == "hopper":
        width, values, records = draw.choice([32, 64, 128]), draw.choice([32, 64, 128]), draw.choice([1, 3, 8])
        verify, move = request.getfixturevalue("hopper"), dense_heads
    dtype, norm, pool = draw.choice(DTYPES), draw.random() < 0.5, batch + 2
    state = torch.randn(pool, heads, width, values)
    pending = records_of(pool, records, heads, width, values)
    untouched = [t.clone() for t in (state, *pending)]
    want_pools = [t.double() for t in (state, *pending)]
    pools = move(draw, device, state, *pending)
    slots = slots_of(draw, batch, pool)
    for _ in range(2):
        rows = draw.randint(0, records)
        positions = step_positions(draw, batch, rows, 50)
        accepted = torch.tensor([draw.randint(0, records) for _ in range(batch)], dtype=torch.int32)
        inputs = rows_of(positions, heads, width, values, dtype)
        want = reference.kda_verify(
            *(t.double() for t in inputs), *want_pools, accepted, slots, positions, 0.3, norm
        )
        indices = move(draw, device, accepted, slots, positions)
        got = verify(*move(draw, device, *inputs), *pools, *indices, 0.3, norm)
        torch.testing.assert_close(got.cpu().double(), want, **OUT_CLOSE[dtype])
        assert (got.cpu()[positions < 0] == 0).all()
        for mine, reference_pool in zip(pools, want_pools):
            torch.testing.assert_close(mine.cpu().double(), reference_pool, **CLOSE)
    idle = [n for n in range(pool) if n not in slots.tolist()]
    for mine, before in zip(pools, untouched):
        assert torch.equal(mine.cpu()[idle], before[idle])


@pytest.mark.parametrize(
    "programs, values, warps", [(96, 128, 4), (132, 64, 2), (96, 32, 1), (133, 128, 1), (768, 128, 1)]
)
def test_warps_of_a_hopper_program(programs: int, values: int, warps: int) -> None:
    """No column of the state may belong to two warps: one could replace what the other has yet to read."""
    assert kda_verify_hopper._warps(programs, values, 132) == warps
    assert warps * 32 <= values


@pytest.mark.seeds(8)
def test_verify_then_commit_is_plain_decoding(draw: random.Random, device: str) -> None:
    """Accepting m of the verified rows leaves the state of kda over those m rows; the outputs agree row by row."""
    rows, heads, width, values = 5, 2, 8, 6
    positions = torch.arange(rows)[None]
    inputs = rows_of(positions, heads, width, values, torch.float32)
    state = torch.randn(1, heads, width, values)
    verified = state.clone().to(device)
    records = [torch.zeros(1, rows, heads, n, device=device) for n in (width, values, width)]
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    positions = positions.to(device)
    inputs = [t.to(device) for t in inputs]
    out = kda_verify(*inputs, verified, *records, zero, slots, positions, 0.3, True)
    assert torch.equal(verified.cpu(), state)  # nothing was accepted before

    kept = draw.randint(0, rows)
    plain = state.clone().to(device)
    committed = kda(*(t[:, :kept] for t in inputs), plain, slots, positions[:, :kept], 0.3, True)
    torch.testing.assert_close(out[:, :kept], committed, **CLOSE)
    nothing = [t[:, :0] for t in inputs]
    kda_verify(*nothing, verified, *records, zero + kept, slots, positions[:, :0], 0.3, True)
    torch.testing.assert_close(verified, plain, **CLOSE)


def test_nothing_accepted_for_a_discarded_step(device: str) -> None:
    """Accepted = 0 commits nothing (no index -1), next to a request that accepted three."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 0, 1, 4, device=device) for _ in range(4)] + [torch.randn(2, 0, 1, device=device)]
    state = torch.randn(3, 1, 4, 4)
    records = [torch.randn(3, 4, 1, 4) for _ in range(2)] + [-torch.rand(3, 4, 1, 4)]
    accepted, slots = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    mine = state.clone().to(device)
    positions = torch.zeros(2, 0, dtype=torch.int64)
    on_device = [t.clone().to(device) for t in records]
    kda_verify(*inputs, mine, *on_device, accepted.to(device), slots.to(device), positions.to(device), 1.0, False)
    want = reference.committed_state(state[:1], *(records[n][:1] for n in range(3)), accepted[1:])
    torch.testing.assert_close(mine[:1].cpu(), want, **CLOSE)
    assert torch.equal(mine[1:].cpu(), state[1:])


def test_more_rows_than_records(device: str) -> None:
    q = torch.zeros(1, 3, 1, 4, device=device)
    state, record = torch.zeros(1, 1, 4, 4, device=device), torch.zeros(1, 2, 1, 4, device=device)
    one = torch.zeros(1, dtype=torch.int32, device=device)
    positions = torch.zeros(1, 3, dtype=torch.int64, device=device)
    with pytest.raises(CapacityError, match="3 rows per request does not fit: at most 2 may stay pending"):
        kda_verify(q, q, q, q, q[..., 0], state, record, record, record, one, one, positions, 1.0, False)


@pytest.mark.gpu
@pytest.mark.seeds(3)
@pytest.mark.parametrize("rows", [1, 8])
def test_full_width(draw: random.Random, rows: int) -> None:
    """96 heads of 128 x 128, both kernels, twice over the same graph."""
    batch, heads, width = 3, 96, 128
    positions = step_positions(draw, batch, rows, 50)
    slots = torch.tensor([4, 0, 2], dtype=torch.int32)
    inputs = rows_of(positions, heads, width, width, torch.bfloat16)
    state, accepted = torch.randn(5, heads, width, width), torch.tensor([0, rows, 1], dtype=torch.int32)
    pending = records_of(5, rows, heads, width, width)
    want_pools = [t.double() for t in (state, *pending)]
    args = (accepted, slots, positions)
    pools, on_gpu, indices = ([t.cuda() for t in group] for group in ((state, *pending), inputs, args))
    kda_verify(*on_gpu, *(t.clone() for t in pools), *indices, width**-0.5, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = kda_verify(*on_gpu, *pools, *indices, width**-0.5, True)
    for _ in range(2):
        want = reference.kda_verify(*(t.double() for t in inputs), *want_pools, *args, width**-0.5, True)
        graph.replay()
        torch.testing.assert_close(got.cpu().double(), want, **OUT_CLOSE[torch.bfloat16])
        for mine, reference_pool in zip(pools, want_pools):
            torch.testing.assert_close(mine.cpu().double(), reference_pool, rtol=1e-4, atol=1e-4)
    want = reference.kda(*(t.double() for t in inputs), want_pools[0], slots, positions, width**-0.5, True)
    got = kda(*on_gpu, pools[0], *indices[1:], width**-0.5, True)
    torch.testing.assert_close(got.cpu().double(), want, **OUT_CLOSE[torch.bfloat16])
    torch.testing.assert_close(pools[0].cpu().double(), want_pools[0], rtol=1e-4, atol=1e-4)
