# SPDX-License-Identifier: Apache-2.0
"""What does compute-sanitizer say of the GPU kernels?

Every kernel is launched once on small inputs, in a process of its own under each of the tools. Run on a GPU, with CUDA's
compute-sanitizer on the path: ``python -m benchmarks.sanitizer [--check] [--tools memcheck racecheck] [--out DIR]``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks import small_kernels
from benchmarks.measure import RESULTS, save
from benchmarks.mla_decode import SCALE, inputs
from dcp_compile.backends import get_backend

TOOLS = ("memcheck", "synccheck", "racecheck")
TIMEOUT = 300.0  # seconds for one case under one tool
# What racecheck reports of the attention kernel though the compiled code keeps the order: see docs/performance.md.
KNOWN = ("_mla_hopper", "RAW")

_HAZARD = re.compile(r"Potential (\w+) hazard detected")
_ACCESS = re.compile(r"(?:Read|Write) Thread \(.*?\) at (\w+)\+0x[0-9a-f]+(?: in (\S+))?")
_SUMMARY = re.compile(r"SUMMARY: (\d+) (?:errors?|hazards?)")


def calls() -> dict[str, Callable[[], object]]:
    """Launches by name."""
    found: dict[str, Callable[[], object]] = {}
    for backend in ("hopper", "triton"):
        for lengths, rows in (([512], 1), ([700, 64, 129], 8)):
            operands = (*inputs(lengths, rows).values(), SCALE)
            name = f"{backend} attention, {len(lengths)} x {rows} rows"
            found[name] = partial(get_backend(backend).attend_rows, *operands)
    small = {**small_kernels.prologue_case(), **small_kernels.kda_cases(batch=1), **small_kernels.tail_cases()}
    return found | {name: call for name, (call, _, _) in small.items()}


def hazards(text: str) -> Iterator[tuple[str, str, str]]:
    """(kernel, kind, where the two accesses are) of every hazard in what racecheck printed."""
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if kind := _HAZARD.search(line):
            accesses = [match for later in lines[index + 1 : index + 3] if (match := _ACCESS.search(later))]
            where = " / ".join(match[2] or "?" for match in accesses)
            yield accesses[0][1] if accesses else "?", kind[1], where


def summary(tool: str, text: str) -> dict:
    """Number of errors, None if the tool did not come to its end, and of each kind of hazard."""
    totals = _SUMMARY.findall(text)
    found: dict = {"errors": int(totals[-1]) if totals else None}
    if tool == "racecheck":
        counts = Counter(hazards(text))
        found["hazards"] = [
            {"kernel": kernel, "kind": kind, "where": where, "count": count}
            for (kernel, kind, where), count in sorted(counts.items())
        ]
    return found


def missed(row: dict) -> Iterator[str]:
    """What keeps one case under one tool from being clean, but for what is known."""
    place = f"{row['case']}, {row['tool']}"
    if row["errors"] is None:
        yield f"{place}: did not end; the last it printed: {row['tail']}"
    elif row["tool"] != "racecheck":
        if row["errors"]:
            yield f"{place}: {row['errors']} errors"
    elif unknown := [h for h in row["hazards"] if (h["kernel"], h["kind"]) != KNOWN]:
        yield f"{place}: {unknown}"


def run(tool: str, case: str) -> dict:
    options = ["--racecheck-report", "hazard"] if tool == "racecheck" else []
    launch = [sys.executable, "-m", "benchmarks.sanitizer", "--launch", case]
    command = ["compute-sanitizer", "--tool", tool, *options, "--show-backtrace", "no", "--print-limit", "1000000", *launch]
    started = time.perf_counter()
    try:
        text = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT).stdout
    except subprocess.TimeoutExpired:
        text = f"stopped after {TIMEOUT:g} s"
    seconds = round(time.perf_counter() - started, 1)
    tail = {} if _SUMMARY.search(text) else {"tail": text[-300:]}
    return {"tool": tool, "case": case, "seconds": seconds, **summary(tool, text), **tail}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 where a tool reports what is not known")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--launch", metavar="CASE", help="launch one case in this process, nothing else")
    arguments = parser.parse_args()
    if arguments.launch:
        calls()[arguments.launch]()
        torch.cuda.synchronize()
        return 0
    rows, failures = [], []
    for case in calls():
        subprocess.run([sys.executable, "-m", "benchmarks.sanitizer", "--launch", case], check=True)  # compiles
        for tool in arguments.tools:
            rows.append(run(tool, case))
            print({key: value for key, value in rows[-1].items() if key != "hazards"}, flush=True)
            failures += missed(rows[-1])
    save("sanitizer", rows, arguments.out)
    print("missed:", *(failures or ["nothing"]), sep="\n  ")
    return 1 if arguments.check and failures else 0


if __name__ == "__main__":
    sys.exit(main())
