# SPDX-License-Identifier: Apache-2.0
"""How long do the prologue, the KDA kernels and short attention tails take, against the bytes they must move?

Kimi-K3 shapes, times per call in a CUDA graph of 20 calls. Run on a GPU:
``python -m benchmarks.small_kernels [--check] [--out DIR]``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import dcp_compile  # noqa: F401  (registers the operators)
from benchmarks.measure import RESULTS, graph_time, roofline, save
from dcp_compile.backends import get_backend

HEADS, DIM, LATENT, ROPE, PAGE = 96, 128, 512, 64, 64
CALLS = 20
dcp = torch.ops.dcp


def kda_cases(batch: int = 8, width: int = 8) -> dict[str, tuple[Callable, float, float]]:
    """Name -> (call, bytes, limit in us)."""

    def rows(count: int, *shape: int, dtype=torch.bfloat16) -> torch.Tensor:
        return torch.randn(batch * count, 1, *shape, device="cuda", dtype=dtype)

    def pool(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, device="cuda")

    state, slots = pool(HEADS, DIM, DIM), torch.arange(batch, device="cuda", dtype=torch.int32)
    pending = [pool(width, HEADS, DIM) for _ in range(3)]
    accepted = torch.full((batch,), width // 2, device="cuda", dtype=torch.int32)
    cases = {}
    for count in (1, width):
        q, k, v = (rows(count, HEADS, DIM) for _ in range(3))
        g = -rows(count, HEADS, DIM, dtype=torch.float32).abs()
        beta = rows(count, HEADS, dtype=torch.float32).sigmoid()
        positions = torch.arange(count, device="cuda").expand(batch, count).contiguous()
        step = (q, k, v, g, beta, state)
        tail = (slots, positions, DIM**-0.5, True)
        moved = 2 * state.numel() * 4 + count * batch * HEADS * DIM * (4 * 2 + 4)
        if count == 1:
            cases["kda decode"] = (lambda s=step, t=tail: dcp.kda(*s, *t), moved, 30.0)
        else:
            moved += 2 * sum(p.numel() * 4 for p in pending)
            call = lambda s=step, t=tail: dcp.kda_verify(*s, *pending, accepted, *t)  # noqa: E731
            cases[f"kda verify {count} rows"] = (call, moved, 45.0)
    return cases


def tail_cases() -> dict[str, tuple[Callable, float, float]]:
    """Attention over the last tokens of one request, 8 query rows."""
    cases = {}
    for length in (8, 64):
        rows, columns = 8, 4096 // PAGE
        query = torch.randn(rows, HEADS, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
        cache = torch.randn(1 + columns, PAGE, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
        table = (torch.randperm(columns, device="cuda") + 1).int()[None]
        requests = torch.zeros(rows, device="cuda", dtype=torch.int32)
        starts = torch.tensor([4096 - length], device="cuda", dtype=torch.int32)
        bounds = torch.full((rows,), 4096, device="cuda", dtype=torch.int32)
        operands = (query[..., :LATENT], query[..., LATENT:], cache, table, requests, starts, bounds, 0.07)
        backend = get_backend("triton")
        moved = length * (LATENT + ROPE) * 2 + rows * HEADS * (2 * LATENT + ROPE) * 2
        cases[f"tail of {length} tokens, 8 rows"] = (lambda o=operands: backend.attend_tail(*o), moved, 6.0)
    return cases


def prologue_case() -> dict[str, tuple[Callable, float, float]]:
    batch, rows, columns = 8, 8, 2048
    positions = torch.arange(batch * rows, device="cuda").view(batch, rows)
    table = torch.ones(batch, columns, device="cuda", dtype=torch.int32)
    lengths = torch.zeros(batch, device="cuda", dtype=torch.int64)
    call = lambda: dcp.step_metadata(positions, table, lengths, PAGE, 0, 2, 1)  # noqa: E731
    return {"prologue, 64 rows": (call, batch * rows * 32, 4.0)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 where a limit is missed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows, missed = [], []
    for name, (call, moved, limit) in {**prologue_case(), **kda_cases(), **tail_cases()}.items():
        micros = graph_time(call, CALLS)
        row = {"case": name, "us": round(micros, 2), "roofline_us": round(roofline(moved, 0), 2), "limit_us": limit}
        print(row, flush=True)
        rows.append(row)
        if micros > limit:
            missed.append(f"{name}: {micros:.1f} us, limit {limit}")
    save("small_kernels", rows, arguments.out)
    print("missed:", *(missed or ["nothing"]), sep="\n  ")
    return 1 if arguments.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
