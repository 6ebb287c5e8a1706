# SPDX-License-Identifier: Apache-2.0
"""How fast is attention over a paged latent cache, against FlashInfer and the roofline?

Kimi-K3 shapes: 96 heads, latent 512 + rope 64, pages of 64 tokens, bf16. Run on a GPU:
``python -m benchmarks.mla_decode [--check] [--out DIR]``.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch

from benchmarks.measure import RESULTS, graph_time, roofline, save
from dcp_compile.backends import get_backend

HEADS, LATENT, ROPE, PAGE = 96, 512, 64, 64
CASES = [  # batch, context, query rows
    (1, 4096, 1), (1, 131072, 1), (8, 32768, 1), (32, 8192, 1), (1, 524288, 1),
    (1, 4096, 8), (1, 131072, 8), (8, 32768, 8), (32, 8192, 8), (1, 524288, 8),
]  # fmt: skip
SCALE = (128 + ROPE) ** -0.5


def inputs(batch: int, context: int, rows: int) -> dict[str, torch.Tensor]:
    """Random queries and cache, shuffled pages; bounds are those of a verify step of ``rows`` tokens."""
    generator = torch.Generator("cuda").manual_seed(context + rows)
    columns = -(-context // PAGE)
    cache = torch.randn(
        1 + batch * columns, PAGE, LATENT + ROPE, generator=generator, device="cuda", dtype=torch.bfloat16
    )
    pages = torch.randperm(batch * columns, generator=generator, device="cuda").int() + 1
    query = torch.randn(
        batch * rows, HEADS, LATENT + ROPE, generator=generator, device="cuda", dtype=torch.bfloat16
    )
    last = torch.full((batch, 1), context, device="cuda") - torch.arange(rows - 1, -1, -1, device="cuda")
    return {
        "q_latent": query[..., :LATENT],
        "q_rope": query[..., LATENT:],
        "kv_cache": cache,
        "block_table": pages.view(batch, columns),
        "requests": torch.arange(batch, device="cuda", dtype=torch.int32).repeat_interleave(rows),
        "bounds": last.reshape(-1).int(),
    }


def flashinfer_call(data: dict[str, torch.Tensor], rows: int):
    """One compact causal call of FlashInfer's fa3 MLA wrapper, planned beforehand; None where it is not installed."""
    try:
        import flashinfer.mla
    except ImportError:
        return None
    batch, columns = data["block_table"].shape
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), backend="fa3"
    )
    context = int(data["bounds"].max())
    wrapper.plan(
        torch.arange(0, batch * rows + 1, rows, dtype=torch.int32),
        torch.arange(0, batch * columns + 1, columns, dtype=torch.int32),
        data["block_table"].flatten(),
        torch.full((batch,), context, dtype=torch.int32),
        HEADS, LATENT, ROPE, PAGE, rows > 1, SCALE, torch.bfloat16, torch.bfloat16,
    )  # fmt: skip
    latent, rope = data["kv_cache"].split([LATENT, ROPE], dim=-1)
    return lambda: wrapper.run(data["q_latent"], data["q_rope"], latent, rope, return_lse=True)


def reference(data: dict[str, torch.Tensor], row: int) -> torch.Tensor:
    """One row in float64, ``[heads, latent]``."""
    request, bound = int(data["requests"][row]), int(data["bounds"][row])
    pages = data["block_table"][request, : -(-bound // PAGE)].long()
    keys = data["kv_cache"][pages].flatten(0, 1)[:bound].double()
    query = torch.cat([data["q_latent"][row], data["q_rope"][row]], -1).double()
    return torch.softmax(query @ keys.T * SCALE, -1) @ keys[:, :LATENT]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 where a threshold is missed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--backends", nargs="+", default=["hopper", "triton"])
    arguments = parser.parse_args()
    results, missed = [], []
    for batch, context, rows in CASES:
        data = inputs(batch, context, rows)
        floor = roofline(
            batch * context * (LATENT + ROPE) * 2, 2 * batch * rows * HEADS * context * (2 * LATENT + ROPE)
        )
        calls = 10 if context <= 4096 else 1
        row = {"batch": batch, "context": context, "rows": rows, "roofline_us": round(floor, 1)}
        peer = flashinfer_call(data, rows)
        if peer is not None:
            row["flashinfer_us"] = round(graph_time(peer, calls), 1)
        wanted = reference(data, rows - 1)
        for name in arguments.backends:
            backend = get_backend(name)
            if backend.unavailable():
                continue
            call = lambda: backend.attend_rows(*data.values(), SCALE)  # noqa: B023,E731
            out = call()[0][rows - 1].double()
            row[f"{name}_error"] = float((out - wanted).norm() / wanted.norm())
            row[f"{name}_us"] = round(graph_time(call, calls), 1)
            row[f"{name}_fraction"] = round(floor / row[f"{name}_us"], 2)
            if not math.isfinite(row[f"{name}_error"]) or row[f"{name}_error"] > 1e-2:
                missed.append(f"{name} at {batch, context, rows}: error {row[f'{name}_error']:.1e}")
        best = min((row[f"{n}_us"] for n in arguments.backends if f"{n}_us" in row), default=math.inf)
        if rows == 8 and context >= 8192 and floor / best < 0.78:
            missed.append(f"{batch, context, rows}: {floor / best:.2f} of the roofline, wanted 0.78")
        if "flashinfer_us" in row and best > 1.02 * row["flashinfer_us"]:
            missed.append(f"{batch, context, rows}: {best / row['flashinfer_us']:.2f} x FlashInfer")
        print(row, flush=True)
        results.append(row)
        del data, peer
    print("missed:", *(missed or ["nothing"]), sep="\n  ")
    save("mla_decode", results, arguments.out)
    return 1 if arguments.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
