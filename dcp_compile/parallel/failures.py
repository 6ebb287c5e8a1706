# SPDX-License-Identifier: Apache-2.0
"""Telling a rank that is gone from every other error."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from .. import _compat
from ..errors import RankError

REMEDY = "The output of the other ranks says why; start all of them again (with a longer timeout if one was only slow)"

# Libraries raise plain RuntimeErrors for lost or silent peers; these words are in all of them (torch 2.11 - 2.13).
_SIGNS = ("gloo", "nccl", "wait timeout", "application timeout")


@contextmanager
def answering_ranks(doing: str) -> Iterator[None]:
    """RankError where a collective inside fails because another rank died or did not answer in time.

    Args:
        doing: what the ranks were about to do, for the message.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(sign in str(error).lower() for sign in _SIGNS):
            raise
        raise RankError(f"another rank died, or did not answer in time, while {doing}: {error}. {REMEDY}") from error


_SPIN_S, _NAP_S = 0.05, 1e-3
_ABORT_S = 2.0  # graphs that hold collectives can keep an abort from returning; their kernels end all the same


def wait_for_device(arrived: torch.cuda.Event, groups: Sequence[dist.ProcessGroup], timeout: float) -> None:
    """Wait for ``arrived``, which collectives of ``groups`` may precede on the device.

    Nobody else watches those of a replayed graph: their kernels would wait for a lost rank for ever. They end when
    their groups are aborted, so that the process can.

    Raises:
        RankError: ``timeout`` seconds were not enough; the groups can no longer be used.
    """
    started = time.monotonic()
    while not arrived.query():
        waited = time.monotonic() - started
        if waited > timeout:
            ending = threading.Thread(target=_compat.abort_collectives, args=(groups,), daemon=True)
            ending.start()
            ending.join(_ABORT_S)
            raise RankError(f"another rank died, or did not answer within {timeout:g} s, while running a step. {REMEDY}")
        time.sleep(0 if waited < _SPIN_S else _NAP_S)  # a step is short; sleep(0) lets other threads of Python run
