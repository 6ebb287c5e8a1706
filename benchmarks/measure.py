# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: timing by CUDA-graph replays, the roofline, and result files with their circumstances."""

from __future__ import annotations

import datetime
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"

# Ceilings of one H200, measured: device-to-device copy, and a large bf16 matrix product.
BYTES_PER_SECOND = 4.3e12
FLOPS_PER_SECOND = 790e12


def roofline(nbytes: float, flops: float) -> float:
    """Shortest time in microseconds that moves the bytes and does the arithmetic."""
    return max(nbytes / BYTES_PER_SECOND, flops / FLOPS_PER_SECOND) * 1e6


def graph_time(function: Callable[[], object], calls: int = 1, replays: int = 40) -> float:
    """Median microseconds per call of ``function`` in replays of a CUDA graph that holds ``calls`` of them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return replay_time(graph.replay, replays) / calls


def replay_time(replay: Callable[[], object], replays: int = 40) -> float:
    """Median microseconds of one ``replay``, without the first five."""
    times = []
    for _ in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times[5:])


def versions() -> dict[str, str]:
    """Versions of everything a figure may depend on."""
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "flashinfer", "fla"):
        try:
            found[name] = __import__(name).__version__
        except (ImportError, AttributeError):
            continue
    return found


def save(name: str, rows: list[dict] | dict, directory: Path = RESULTS) -> Path:
    """Write a result file; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    content = {"date": datetime.date.today().isoformat(), "device": device, "versions": versions(), "rows": rows}
    path = directory / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
