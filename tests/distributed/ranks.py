# SPDX-License-Identifier: Apache-2.0
"""Run a function on several ranks that are forked from this process, so that they share what it has captured.

Fork from a fresh process (a script), never from one that may hold threads or process groups.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("fork")


def run_ranks(
    world: int, job: Callable[..., Any], *arguments: Any, timeout: float = 300.0, patience: float = math.inf
) -> list[Any]:
    """``job(*arguments)`` on every rank of a gloo group; its results, which must be JSON, by rank.

    A rank that raises, dies or is not done in time gives a string that says so instead; no rank outlives the call.

    Args:
        timeout: seconds for all of them. patience: seconds the others get once a rank is done.
    """
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world):
            receiver, sender = _context.Pipe(duplex=False)
            place = (rank, world, os.path.join(folder, "rendezvous"), timeout)
            process = _context.Process(target=_run_rank, args=(sender, place, job, arguments), daemon=True)
            process.start()
            sender.close()
            ranks.append((process, receiver))
        results = []
        for process, receiver in ranks:
            results.append(_receive(process, receiver, deadline))
            deadline = min(deadline, time.monotonic() + patience)
        for process, _ in ranks:
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
    return results


def _run_rank(sender: Connection, place: tuple[int, int, str, float], job: Callable[..., Any], arguments: tuple) -> None:
    rank, world, path, timeout = place
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{path}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
        )
        sender.send_bytes(json.dumps(job(*arguments)).encode())
    except BaseException:
        sender.send_bytes(json.dumps(f"rank {rank} failed:\n{traceback.format_exc()}").encode())
    finally:
        sender.close()
        os._exit(0)  # neither the parent's exit handlers nor a wait for ranks that are gone


def _receive(process: multiprocessing.Process, receiver: Connection, deadline: float) -> Any:
    if not receiver.poll(max(0.0, deadline - time.monotonic())):
        return "no answer in time"
    try:
        return json.loads(receiver.recv_bytes())
    except EOFError:
        process.join(1)
        return f"ended without an answer, exit code {process.exitcode}"
