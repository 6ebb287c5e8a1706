# SPDX-License-Identifier: Apache-2.0
"""How fast is attention over a paged latent cache, against FlashInfer and the roofline?

Kimi-K3 shapes: 96 heads, latent 512 + rope 64, pages of 64 tokens, bf16. Run on a GPU:
``python -m benchmarks.mla_decode [--check] [--out DIR]``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.measure import RESULTS, graph_time, roofline, save
from dcp_compile.backends import get_backend

HEADS, LATENT, ROPE, PAGE = 96, 512, 64, 64
SCALE = (128 + ROPE) ** -0.5
CASES = [  # requests, context, query rows
    (1, 4096, 1), (1, 131072, 1), (8, 32768, 1), (32, 8192, 1), (1, 524288, 1),
    (1, 4096, 8), (1, 131072, 8), (8, 32768, 8), (32, 8192, 8), (1, 524288, 8),
]  # fmt: skip
# Tokens per request, compared with the longest alone; the short ones are 3 % of the work of the first, 32 % of the second.
UNEVEN = [[32768, 256, 1, 100, 128, 64, 333, 129], [32768, 4096, 1, 700, 2048, 64, 3333, 129]]

LEAST_FRACTION = {
    (1, 131072, 8): 0.80, (8, 32768, 8): 0.80, (32, 8192, 8): 0.80, (1, 524288, 8): 0.78,
    (1, 524288, 1): 0.60, (8, 32768, 1): 0.60,
}  # fmt: skip
MOST_MICROSECONDS = {(1, 4096, 1): 13.0}
LEAST_GAIN_OVER_ROWS = {(1, 131072, 8): 1.4, (1, 524288, 8): 1.4}
MOST_OF_COMPACT = 1.02
MOST_OF_LONGEST = 1.10
MOST_ERROR = 1e-2
RESIDENT = 64  # pages that stay in the L2 cache


def inputs(lengths: list[int], rows: int) -> dict[str, torch.Tensor]:
    """Random queries and cache, shuffled pages; bounds are those of a verify step of ``rows`` tokens."""
    generator = torch.Generator("cuda").manual_seed(sum(lengths) + rows)
    batch, columns = len(lengths), -(-max(lengths) // PAGE)
    given = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    query = torch.randn(batch * rows, HEADS, LATENT + ROPE, **given)
    pages = torch.randperm(batch * columns, generator=generator, device="cuda").int() + 1
    bounds = torch.tensor(lengths, device="cuda")[:, None] - torch.arange(rows - 1, -1, -1, device="cuda")
    return {
        "q_latent": query[..., :LATENT],
        "q_rope": query[..., LATENT:],
        "kv_cache": torch.randn(1 + batch * columns, PAGE, LATENT + ROPE, **given),
        "block_table": pages.view(batch, columns),
        "requests": torch.arange(batch, device="cuda", dtype=torch.int32).repeat_interleave(rows),
        "bounds": bounds.clamp_min(0).reshape(-1).int(),
    }


def flashinfer_call(data: dict[str, torch.Tensor], flattened: bool) -> Callable[[], object]:
    """A call of FlashInfer's fa3 MLA wrapper, planned beforehand: causal and compact, or every row its own request."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    table, bounds = data["block_table"], data["bounds"].cpu()
    rows = len(bounds) // len(table)
    if flattened:
        table, lengths, rows = table.repeat_interleave(rows, dim=0), bounds, 1
    else:
        lengths = bounds[rows - 1 :: rows].contiguous()
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), backend="fa3")
    wrapper.plan(
        torch.arange(0, len(bounds) + 1, rows, dtype=torch.int32),
        torch.arange(0, table.numel() + 1, table.shape[1], dtype=torch.int32),
        table.flatten(),
        lengths,
        HEADS, LATENT, ROPE, PAGE, rows > 1, SCALE, torch.bfloat16, torch.bfloat16,
    )  # fmt: skip
    latent, rope = data["kv_cache"].split([LATENT, ROPE], dim=-1)
    return lambda: wrapper.run(data["q_latent"], data["q_rope"], latent, rope, return_lse=True)


def peers(data: dict[str, torch.Tensor], rows: int) -> dict[str, Callable[[], object]]:
    """FlashInfer's calls by name; none where it is not installed."""
    try:
        calls = {"flashinfer": flashinfer_call(data, flattened=False)}
    except ImportError:
        return {}
    return calls if rows == 1 else {**calls, "flashinfer_rows": flashinfer_call(data, flattened=True)}


def error(data: dict[str, torch.Tensor], row: int, out: torch.Tensor) -> float:
    """Relative error of one row of ``out [T, heads, latent]`` against float64."""
    request, bound = int(data["requests"][row]), int(data["bounds"][row])
    pages = data["block_table"][request, : -(-bound // PAGE)].long()
    keys = data["kv_cache"][pages].flatten(0, 1)[:bound].double()
    query = torch.cat([data["q_latent"][row], data["q_rope"][row]], -1).double()
    wanted = torch.softmax(query @ keys.T * SCALE, -1) @ keys[:, :LATENT]
    return float((out[row].double() - wanted).norm() / wanted.norm())


def measure(lengths: list[int], rows: int, backends: list[str]) -> dict:
    """Microseconds of every backend and peer; ``best_us`` is that of the fastest backend."""
    data = inputs(lengths, rows)
    tokens, calls = sum(lengths), 10 if max(lengths) <= 4096 else 1
    nbytes, flops = tokens * (LATENT + ROPE) * 2, 2 * rows * HEADS * tokens * (2 * LATENT + ROPE)
    floor = roofline(nbytes, flops)
    found = {"batch": len(lengths), "context": max(lengths), "rows": rows, "roofline_us": round(floor, 1)}
    for name in backends:
        call = lambda: get_backend(name).attend_rows(*data.values(), SCALE)  # noqa: B023,E731
        found[f"{name}_error"] = error(data, rows - 1, call()[0])
        found[f"{name}_us"] = round(graph_time(call, calls), 1)
        found[f"{name}_fraction"] = round(floor / found[f"{name}_us"], 3)
    found["best_us"] = min(found[f"{name}_us"] for name in backends)
    if tokens > 100_000:  # the same work without the memory: all keys from a few pages
        resident = data | {"block_table": data["block_table"] % RESIDENT + 1}
        call = lambda: get_backend(backends[0]).attend_rows(*resident.values(), SCALE)  # noqa: E731
        found[f"{backends[0]}_resident_us"] = round(graph_time(call, calls), 1)
    for name, call in peers(data, rows).items():
        found[f"{name}_us"] = round(graph_time(call, calls), 1)
    return found


def missed(found: dict) -> Iterator[str]:
    """What a result lacks of the thresholds for its case."""
    case, best = (found["batch"], found["context"], found["rows"]), found["best_us"]
    compact, flattened = found.get("flashinfer_us"), found.get("flashinfer_rows_us")
    for name in (key for key in found if key.endswith("_error")):
        if not found[name] <= MOST_ERROR:
            yield f"{name} {found[name]:.1e}, at most {MOST_ERROR}"
    if "longest_alone_us" in found:
        if best > MOST_OF_LONGEST * found["longest_alone_us"]:
            yield f"{best} us, at most {MOST_OF_LONGEST} x {found['longest_alone_us']} us of the longest request alone"
        return
    if found["roofline_us"] / best < LEAST_FRACTION.get(case, 0):
        yield f"{found['roofline_us'] / best:.3f} of the roofline, at least {LEAST_FRACTION[case]}"
    if best > MOST_MICROSECONDS.get(case, best):
        yield f"{best} us, at most {MOST_MICROSECONDS[case]}"
    if compact is not None and best > MOST_OF_COMPACT * compact:
        yield f"{best / compact:.2f} x the time of FlashInfer's compact call, at most {MOST_OF_COMPACT}"
    if flattened is not None and flattened / best < LEAST_GAIN_OVER_ROWS.get(case, 0):
        yield f"{flattened / best:.2f} times as fast as flattened rows, at least {LEAST_GAIN_OVER_ROWS[case]}"


def line(found: dict) -> str:
    """One result in one line."""
    times = [f"{key[:-3]} {value}" for key, value in found.items() if key.endswith("_us") and key != "best_us"]
    fraction = found["roofline_us"] / found["best_us"]
    case = f"{found['batch']} x {found['context']}, {found['rows']} rows"
    return f"{case}: {', '.join(times)} us; best {fraction:.2f} of roofline"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 where a threshold is missed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--backends", nargs="+", default=["hopper", "triton"])
    arguments = parser.parse_args()
    names = [name for name in arguments.backends if get_backend(name).unavailable() is None]
    if not names:
        parser.error("; ".join(f"{name}: {get_backend(name).unavailable()}" for name in arguments.backends))
    results, failures = [], []
    uneven = [(lengths, rows) for lengths in UNEVEN for rows in (1, 8)]
    for lengths, rows in [*(([context] * batch, rows) for batch, context, rows in CASES), *uneven]:
        found = measure(lengths, rows, names)
        if lengths in UNEVEN:
            alone, together = (measure([length], rows, names)["best_us"] for length in (max(lengths), sum(lengths)))
            found |= {"lengths": lengths, "longest_alone_us": alone, "as_one_request_us": together}
        print(line(found), flush=True)
        failures += [f"{line(found).partition(':')[0]}: {text}" for text in missed(found)]
        results.append(found)
    print("missed:", *(failures or ["nothing"]), sep="\n  ")
    save("mla_decode", results, arguments.out)
    return 1 if arguments.check and failures else 0


if __name__ == "__main__":
    sys.exit(main())
