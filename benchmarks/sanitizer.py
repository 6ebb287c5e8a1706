# SPDX-License-Identifier: Apache-2.0
"""What does compute-sanitizer say of the kernels of attention, metadata and KDA?

Each is launched once on small inputs, in a process of its own under each of the tools; for racecheck the compiled code gets
barriers around its partitions, see :func:`settled`. Run on a GPU, with CUDA's compute-sanitizer on the path:
``python -m benchmarks.sanitizer [--check] [--tools memcheck racecheck] [--jobs 4] [--out DIR]``.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import triton

from benchmarks import small_kernels
from benchmarks.measure import RESULTS, save
from benchmarks.mla_decode import SCALE, inputs
from dcp_compile.backends import get_backend

TOOLS = ("memcheck", "synccheck", "racecheck")
TIMEOUT = 300.0  # seconds for one case under one tool

_HAZARD = re.compile(r"Potential (\w+) hazard detected")
_ACCESS = re.compile(r"(?:Read|Write) Thread \(.*?\) at (\w+)\+0x[0-9a-f]+(?: in (\S+))?")
_SUMMARY = re.compile(r"SUMMARY: (\d+) (?:errors?|hazards?)")
_HAND_OVER = re.compile(r"(st\.shared[^\n]*\n)(\s*barrier\.sync\s+1;)")
_BROKEN = re.compile(r"Internal Sanitizer Error|Target application returned an error")


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


def settled(ptx: str) -> str:
    """The code with a barrier more where Triton tells partitions what to run, with which arguments, and that all is done.

    That is a store, then a barrier of all threads at which the readers wait already, and racecheck reports such a pair
    unless another barrier of the writers lies between. One that is followed at once by one of all threads orders nothing
    that this does not order: what is reported without it and not with it is no race.
    """
    return _HAND_OVER.sub(r"\1\tbar.sync \t0, 128;\n\2", ptx)


def _settle(backend: object, stages: dict, *_: object) -> None:
    assemble = stages["cubin"]
    stages["cubin"] = lambda ptx, metadata: assemble(settled(ptx), metadata)


def hazards(text: str) -> Iterator[tuple[str, str, str]]:
    """(kernels, kind, where the two accesses are) of every hazard in what racecheck printed."""
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if kind := _HAZARD.search(line):
            accesses = [match for later in lines[index + 1 : index + 3] if (match := _ACCESS.search(later))]
            kernels = " / ".join(dict.fromkeys(match[1] for match in accesses))
            yield kernels or "?", kind[1], " / ".join(match[2] or "?" for match in accesses)


def summary(tool: str, status: int | None, text: str) -> dict:
    """What a tool said of one launch.

    Args:
        status: the tool's exit status, None if it was stopped. text: what it and the launch printed.

    Returns:
        ``errors``, the number of them; ``hazards`` of racecheck, equal ones counted; ``broken``, the end of ``text`` where
        there is no telling, since something else than an error was met.
    """
    totals = [int(total) for total in _SUMMARY.findall(text)]
    found: dict = {"errors": max(totals, default=0)}
    listed = found["errors"]
    if tool == "racecheck":
        counts = Counter(hazards(text))
        found["hazards"] = [
            {"kernel": kernel, "kind": kind, "where": where, "count": count}
            for (kernel, kind, where), count in sorted(counts.items())
        ]
        listed = counts.total()
    if status != 0 or not totals or _BROKEN.search(text) or found["errors"] > listed:
        found["broken"] = f"status {status}: {text[-300:]}"
    return found


def missed(row: dict) -> Iterator[str]:
    """What keeps one case under one tool from being clean."""
    place = f"{row['case']}, {row['tool']}"
    if "broken" in row:
        yield f"{place}: {row['broken']}"
    elif row["errors"]:
        yield f"{place}: {row['errors']} errors {row.get('hazards', '')}".rstrip()


def launch(case: str, settled: bool = False) -> list[str]:
    return [sys.executable, "-m", "benchmarks.sanitizer", "--launch", case, *(["--settled"] if settled else [])]


def compile_case(case: str, settled: bool = False, environment: dict[str, str] | None = None) -> None:
    """Launch it without a tool, which would make the compiler slow."""
    subprocess.run(launch(case, settled), check=True, env=environment)


def run(tool: str, case: str) -> dict:
    race = tool == "racecheck"
    command = ["compute-sanitizer", "--tool", tool, "--show-backtrace", "no", "--print-limit", "1000000"]
    command += ["--racecheck-report", "hazard"] if race else []
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryDirectory() as cache:
        environment = os.environ | ({"TRITON_CACHE_DIR": cache} if race else {})  # its keys do not tell settled code
        if race:
            compile_case(case, race, environment)
        process = subprocess.Popen(
            command + launch(case, race), stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        try:
            status = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the launch as well: it would go on beside the next
            process.wait()
            status = None
        output.seek(0)
        found = summary(tool, status, output.read())
    return {"tool": tool, "case": case, "seconds": round(time.perf_counter() - started, 1), **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 where a tool reports anything")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--jobs", type=int, default=4, help="launches at once (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--launch", metavar="CASE", help="launch one case in this process, nothing else")
    parser.add_argument("--settled", action="store_true", help="launch it as racecheck can judge it")
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        parser.error(f"--jobs {arguments.jobs}: at least one launch at a time")
    if arguments.settled:
        triton.knobs.runtime.add_stages_inspection_hook = _settle
    if arguments.launch:
        calls()[arguments.launch]()
        torch.cuda.synchronize()
        return 0
    cases, rows = list(calls()), []
    tasks = [(tool, case) for case in cases for tool in arguments.tools]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        if set(arguments.tools) != {"racecheck"}:
            list(pool.map(compile_case, cases))
        for row in pool.map(run, *zip(*tasks)):
            rows.append(row)
            print({key: value for key, value in row.items() if key != "hazards"}, flush=True)
            save("sanitizer", rows, arguments.out)  # it takes minutes, and may be stopped
    failures = [text for row in rows for text in missed(row)]
    print("missed:", *(failures or ["nothing"]), sep="\n  ")
    return 1 if arguments.check and failures else 0


if __name__ == "__main__":
    sys.exit(main())
