# SPDX-License-Identifier: Apache-2.0
"""Telling a rank that is gone from every other error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ..errors import RankError

REMEDY = "The output of the other ranks says why; start all of them again (with a longer timeout if one was only slow)"

# Libraries raise plain RuntimeErrors for lost or silent peers; these words are in all of them (torch 2.11 - 2.13).
_SIGNS = ("gloo", "nccl", "wait timeout")


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
