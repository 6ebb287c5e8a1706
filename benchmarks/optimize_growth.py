# SPDX-License-Identifier: Apache-2.0
"""How long does a whole optimize() with Inductor take, by depth, with empty and with filled compiler caches?

The models are those of ``capture_growth.py``. Every figure is wall-clock time of a process of its own, imports and making
the model left out, on the GPU if there is one: ``python -m benchmarks.optimize_growth [--depths 9,27,93] [--out DIR]``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import dcp_compile
from benchmarks.capture_growth import exponent, narrow_model
from benchmarks.measure import RESULTS, save
from dcp_compile import DCPConfig


def optimize_once(layers: int) -> dict[str, float]:
    """Seconds of one optimize() in this process, of capture alone, and how many regions were compiled."""
    model = narrow_model(layers).to("cuda" if torch.cuda.is_available() else "cpu")
    config = DCPConfig(max_batch_size=1, max_seq_len=256, num_speculative_tokens=3, lowering="inductor")
    started = time.perf_counter()
    dcp_compile.optimize(model, config=config)
    seconds = time.perf_counter() - started
    report = model._dcp.report
    return {
        "seconds": round(seconds, 1),
        "capture_s": round(report.graph.capture_seconds, 1),
        "passes_s": round(sum(result.seconds for result in report.passes), 1),
        "regions": report.regions.regions,
        "compiled": len(report.regions.compiled),
    }


def in_new_process(layers: int, caches: str) -> dict[str, float]:
    folders = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
    command = [sys.executable, "-m", "benchmarks.optimize_growth", "--once", str(layers)]
    done = subprocess.run(command, env={**os.environ, **folders}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depths", default="9,27,93")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--once", type=int, metavar="LAYERS", help="one optimize() in this process, its figures as JSON")
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(optimize_once(arguments.once)))
        return
    rows: list[dict[str, float]] = []
    for layers in map(int, arguments.depths.split(",")):
        with tempfile.TemporaryDirectory() as caches:
            cold, warm = (in_new_process(layers, caches) for _ in range(2))
        row = {"layers": layers, **cold, "warm_s": warm["seconds"]}
        if rows:
            row["exponent"] = round(exponent(rows[-1], row, "seconds"), 3)
        rows.append(row)
        print(json.dumps(row), flush=True)
        save("optimize_growth", rows, arguments.out)


if __name__ == "__main__":
    main()
