# SPDX-License-Identifier: Apache-2.0
"""What does a whole decode step cost, how much of it is the GPU idle, and what does a verify step of 8 rows add?

Four layers of Kimi-K3's widths (three KDA, one MLA; 64 experts of full size instead of 896), bf16, one request, at short
and long context. Idle time is what the kernels of one replay leave free between its first and its last. The predicted
ratio of verify to decode weighs the bytes each reads, and the attention's arithmetic. The same MLA layer is timed in
the form transformers runs it: keys and values expanded, then scaled_dot_product_attention.

Run on a GPU: ``python -m benchmarks.decode_step [--check] [--out DIR]``.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

import dcp_compile
from benchmarks.measure import BYTES_PER_SECOND, RESULTS, graph_time, replay_time, roofline, save
from dcp_compile.backends import get_backend
from dcp_compile.models import KimiK3Config

CONTEXTS, ROWS = (2048, 131072), 8
LAYERS, EXPERTS, HEADS, LATENT, ROPE, DIM = 4, 64, 96, 512, 64, 128


def build() -> torch.nn.Module:
    config = KimiK3Config(
        vocab_size=32768, num_hidden_layers=LAYERS, num_experts=EXPERTS, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def predicted_us(model: torch.nn.Module, rows: int, context: int) -> float:
    """Weights are read once (of the experts, the distinct ones ``rows`` tokens hit on average), so are cache and states."""
    nbytes = 0.0
    top_k = model.config.num_experts_per_token
    hit = EXPERTS * (1 - (1 - top_k / EXPERTS) ** rows)
    for name, parameter in model.named_parameters():
        if "embed_tokens" not in name:
            nbytes += parameter.nbytes * (hit / EXPERTS if ".experts." in name else 1)
    recurrent = sum(kind != "full_attention" for kind in model.config.layer_types)
    nbytes += recurrent * 2 * HEADS * DIM * DIM * 4
    attention = roofline(context * (LATENT + ROPE) * 2, 2 * rows * HEADS * context * (2 * LATENT + ROPE))
    return nbytes / BYTES_PER_SECOND * 1e6 + attention * (LAYERS - recurrent)


def kernels_of(replay) -> list[tuple[str, float, float]]:
    """Name, start and end (microseconds) of every kernel of one replay."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        replay()
        torch.cuda.synchronize()
    events = [event for event in recorded.events() if event.device_type == DeviceType.CUDA]
    return sorted(((e.name, e.time_range.start, e.time_range.end) for e in events), key=lambda e: e[1])


def busy(kernels: list[tuple[str, float, float]]) -> tuple[float, float]:
    """Microseconds in which at least one kernel runs, and those from the first's start to the last's end."""
    total, reached = 0.0, kernels[0][1]
    for _, start, end in kernels:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total, reached - kernels[0][1]


def measure(engine, context: int, rows: int) -> tuple[dict, list[tuple[str, float]]]:
    """One step of ``rows`` tokens after ``context`` tokens, and its kernels by the time they take."""
    with engine.open(1, context + 2 * ROWS) as session:
        session.lengths = [context]  # what the cache holds does not matter for time
        if rows == 1:
            session.decode(torch.tensor([5]), [True])
            replay = engine.step.bucket(1, 1).graph.replay
        else:
            session.verify(torch.arange(5, 5 + rows)[None], [rows])
            session.commit([0])
            replay = engine.verify.bucket(1, rows).graph.replay
        micros = replay_time(replay)
        kernels = min((kernels_of(replay) for _ in range(3)), key=lambda found: busy(found)[1])
    working, span = busy(kernels)
    by_name: dict[str, float] = {}
    for name, start, end in kernels:
        by_name[name] = by_name.get(name, 0.0) + end - start
    row = {
        "context": context,
        "rows": rows,
        "us": round(micros, 1),
        "kernels": len(kernels),
        "prologues": sum("_step_metadata" in name for name, _, _ in kernels),
        "busy_us": round(working, 1),
        "idle": round(1 - working / span, 4),
    }
    return row, sorted(by_name.items(), key=lambda item: -item[1])


def layer_against_expanded(context: int = 131072) -> dict:
    """The attention of one MLA layer: absorbed, through our kernel, against expanded keys and values."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / 8

    pages = context // 64
    cache, weight = randn(1 + pages, 64, LATENT + ROPE), randn(HEADS, 2 * DIM, LATENT)
    query = randn(1, HEADS, DIM + ROPE)
    table = torch.arange(1, 1 + pages, device="cuda", dtype=torch.int32)[None]
    requests = torch.zeros(1, device="cuda", dtype=torch.int32)
    bounds = requests + context
    scale = (DIM + ROPE) ** -0.5
    attend = get_backend("hopper" if get_backend("hopper").unavailable() is None else "triton").attend_rows

    def absorbed() -> torch.Tensor:
        latent = torch.einsum("thd,hdr->thr", query[..., :DIM], weight[:, :DIM])
        out, _ = attend(latent, query[..., DIM:], cache, table, requests, bounds, scale)
        return torch.einsum("thr,hdr->thd", out, weight[:, DIM:])

    def expanded() -> torch.Tensor:
        held = cache[1:].reshape(context, LATENT + ROPE)
        rope = held[None, :, LATENT:].expand(HEADS // 2, -1, -1)
        outs = []
        for part, q in zip(weight.chunk(2), query[0, :, None].chunk(2)):  # a product of 2^31 numbers fails in cuBLAS
            both = (held[:, :LATENT] @ part.reshape(-1, LATENT).T).view(context, -1, 2 * DIM).transpose(0, 1)
            key = torch.cat([both[..., :DIM], rope], -1)
            outs.append(torch.nn.functional.scaled_dot_product_attention(q[None], key[None], both[None, ..., DIM:], scale=scale))
        return torch.cat(outs, 1)[:, :, 0]

    error = float((absorbed() - expanded()).abs().max() / expanded().abs().max())
    ours, peer = graph_time(absorbed, 4), graph_time(expanded, replays=10)
    return {"context": context, "layer_us": round(ours, 1), "expanded_us": round(peer, 1), "ratio": round(peer / ours, 1),
            "error": round(error, 4)}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 where a limit is missed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(False)
    rows, missed = [], []
    layer = layer_against_expanded()
    print(layer, flush=True)
    if layer["ratio"] < 100:
        missed.append(f"MLA layer {layer['ratio']}x faster than expanded, wanted 100x")
    model = build()
    predicted = {place: predicted_us(model, place[1], place[0]) for place in [(c, r) for c in CONTEXTS for r in (1, ROWS)]}
    started = time.perf_counter()
    config = dcp_compile.DCPConfig(max_batch_size=1, max_seq_len=max(CONTEXTS) + 64, num_speculative_tokens=ROWS - 1)
    dcp_compile.optimize(model, config=config)
    seconds = round(time.perf_counter() - started, 1)
    engine = model._dcp_engine
    for context in CONTEXTS:
        for count in (1, ROWS):
            row, kernels = measure(engine, context, count)
            row["predicted_us"] = round(predicted[context, count], 1)
            row["longest"] = [[name[:60], round(micros, 1)] for name, micros in kernels[:8]]
            rows.append(row)
            print({key: value for key, value in row.items() if key != "longest"}, flush=True)
            if row["idle"] > 0.03:
                missed.append(f"idle {row['idle']:.1%} at context {context}, {count} rows, wanted 3 %")
            if row["prologues"] != 1:
                missed.append(f"{row['prologues']} prologues in a step")
        step, verify = rows[-2:]
        ratio = verify["us"] / step["us"]
        wanted = verify["predicted_us"] / step["predicted_us"]
        verify["ratio"], verify["predicted_ratio"] = round(ratio, 2), round(wanted, 2)
        print(f"verify / decode {ratio:.2f}, predicted {wanted:.2f}", flush=True)
        if ratio > 1.15 * wanted:
            missed.append(f"verify / decode {ratio:.2f} at context {context}, wanted 1.15 x {wanted:.2f}")
    save("decode_step", {"optimize_s": seconds, "layer": layer, "steps": rows}, arguments.out)
    print("missed:", *(missed or ["nothing"]), sep="\n  ")
    return 1 if arguments.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
