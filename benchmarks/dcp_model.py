# SPDX-License-Identifier: Apache-2.0
"""What should attention over 2, 4, 8 GPUs of one host, and over 16 of two, cost a decode step of Kimi-K3?

A prediction from bytes, FLOPs and messages, to be held against `dcp_scaling.py`. The time of one layer's attention is a
line in the keys a rank holds, fitted to one GPU and two; the exchange is a latency and a rate, fitted to two GPUs' peer memory.
Hosts are assumed to be joined by 400 Gb/s per GPU, at 20 us per message through NCCL; that is measured nowhere here.

``python -m benchmarks.dcp_model [--out DIR]``; needs no GPU, only ``results/dcp_scaling.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.measure import RESULTS, save
from dcp_compile.models import KimiK3Config

HEADS, LATENT, ROPE = 96, 512, 64
CONTEXTS, ROWS, SIZES = (131072, 524288, 1048576), (1, 8), (1, 2, 4, 8, 16)
HOST = 8  # GPUs of one host
BETWEEN_HOSTS_US, BETWEEN_HOSTS_BYTES_PER_US = 20.0, 50e3


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Offset, at least 0, and slope of the line through ``(x, y)`` with the least squares of relative errors."""
    weights = [1 / y**2 for _, y in points]
    count, x, y = sum(weights), sum(w * p[0] for w, p in zip(weights, points)), sum(1 / p[1] for p in points)
    xx, xy = sum(w * p[0] ** 2 for w, p in zip(weights, points)), sum(p[0] / p[1] for p in points)
    slope = (count * xy - x * y) / (count * xx - x * x)
    offset = (y - slope * x) / count
    return (offset, slope) if offset >= 0 else (0.0, xy / xx)


def message_bytes(rows: int, size: int) -> int:
    """Bytes a rank sends in one layer with heads sharded: its queries to all others, and each its part of the outputs."""
    own = HEADS // size
    return (size - 1) * rows * own * ((LATENT + ROPE) * 2 + LATENT * 2 + 4)


class Model:
    """The fitted lines: attention by rows, in keys of a rank; exchange, in bytes a rank sends."""

    def __init__(self, measured: dict[str, list[dict]]) -> None:
        whole = [row for row in measured["attention"] if row["gpus"] <= 2 and row["heads"] == HEADS]
        self.attention = {
            rows: line([(row["context"] / row["gpus"], row["us"]) for row in whole if row["rows"] == rows])
            for rows in ROWS
        }
        if not any(row["gpus"] == 2 for row in measured.get("exchange", [])):
            raise SystemExit("no exchange on two GPUs was measured: run benchmarks.dcp_scaling on at least two")
        sharded = [row for row in measured["exchange"] if row["gpus"] == 2 and row["heads"] == "sharded"]
        self.exchange = line([(message_bytes(row["rows"], 2), row["peers_us"]) for row in sharded])

    def attention_us(self, context: int, rows: int, size: int) -> float:
        offset, slope = self.attention[rows]
        return offset + slope * context / size

    def exchange_us(self, rows: int, size: int) -> float:
        if size == 1:
            return 0.0
        offset, slope = self.exchange
        inside = offset + slope * message_bytes(rows, min(size, HOST))
        if size <= HOST:
            return inside
        # Two messages, queries and outputs, to and from the ranks of the other host.
        crossing = message_bytes(rows, size) * (size - HOST) / (size - 1)
        return inside + 2 * BETWEEN_HOSTS_US + crossing / BETWEEN_HOSTS_BYTES_PER_US


def predictions(measured: dict[str, list[dict]]) -> list[dict]:
    """One row per context, rows and size; ``measured_us`` where two GPUs were measured."""
    model, kinds = Model(measured), KimiK3Config().layer_types
    layers = sum(kind == "full_attention" for kind in kinds)
    seen = {(r["gpus"], r["context"], r["rows"]): r["us"] for r in measured["attention"] if r["heads"] == HEADS}
    found = []
    for context in CONTEXTS:
        for rows in ROWS:
            for size in SIZES:
                attention, exchange = model.attention_us(context, rows, size), model.exchange_us(rows, size)
                found.append({
                    "context": context, "rows": rows, "gpus": size, "attention_us": round(attention, 1),
                    "measured_us": seen.get((size, context, rows)), "exchange_us": round(exchange, 1),
                    "layers_ms": round(layers * (attention + exchange) / 1e3, 2),
                    "kv_bytes_per_gpu": layers * context * (LATENT + ROPE) * 2 // size,
                })  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = predictions(json.loads((RESULTS / "dcp_scaling.json").read_text())["rows"])
    print(*rows, sep="\n")
    save("dcp_model", rows, arguments.out)


if __name__ == "__main__":
    main()
