# SPDX-License-Identifier: Apache-2.0
"""How long verify steps and draft blocks take, measured once so that adaptive verification can weigh them."""

from __future__ import annotations

import bisect
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..parallel import ParallelLayout
from .graphs import buckets

if TYPE_CHECKING:
    from .draft import DraftEngine
    from .engine import Engine

_WARM_UPS = 1
_SAMPLES = 5


@dataclass(frozen=True)
class StepCosts:
    """Time of one step.

    Attributes:
        table: by requests of a bucket, ascending: seconds by rows of all its requests together, ascending in both.
    """

    table: Mapping[int, Mapping[int, float]]

    def seconds(self, requests: int, rows: int) -> float:
        """Seconds of a step of at most ``requests`` requests with ``rows`` rows in all, linear between what was measured.

        Between buckets a step is padded to the next one, but padded rows read neither keys nor the weights of experts of
        their own, which is what time goes into.
        """
        points = self.table[min(size for size in self.table if size >= requests)]
        known = list(points)
        above = bisect.bisect_left(known, rows)
        if above == 0:
            return points[known[0]]
        low, high = known[above - 1], known[min(above, len(known) - 1)]
        share = (rows - low) / (high - low) if high > low else 0.0
        return points[low] + share * (points[high] - points[low])


def measure_verify(engine: Engine) -> StepCosts:
    """The leader's times of verify steps on short contexts. Every rank takes part; pages and slots end up free again."""
    generator = torch.Generator().manual_seed(0)  # the same tokens on all ranks
    batches, widths = buckets(engine.config.max_batch_size), buckets(engine.max_query_rows)
    seconds = []
    for batch, rows in itertools.product(batches, widths):
        tokens = torch.randint(engine.vocab_size, (batch, rows), generator=generator)
        with engine.open(batch, 1) as session:

            def step() -> None:
                session.verify(tokens, [rows] * batch)
                session.commit([0] * batch)

            seconds.append(_median_seconds(step, engine.parallel, engine.device))
    engine.verify_steps = 0  # these were no steps of a generation
    times = iter(_of_the_leader(seconds, engine.parallel, engine.device))
    table = {}
    for batch in batches:
        # More rows cannot be cheaper: what says so is noise.
        rising = itertools.accumulate((next(times) for _ in widths), max)
        table[batch] = {batch * rows: value for rows, value in zip(widths, rising)}
    return StepCosts(table)


def measure_blocks(draft: DraftEngine, engine: Engine) -> StepCosts:
    """The leader's times of whole draft blocks for ``engine``. Nothing is written: the block tables are empty."""
    seconds, batches = [], buckets(engine.config.max_batch_size)
    for batch in batches:
        anchors, table = torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, engine.columns, dtype=torch.int32)
        lengths, counts = torch.zeros_like(anchors), torch.full_like(anchors, draft.width)
        step = functools.partial(draft.run_block, anchors, lengths, table, counts, draft.width)
        seconds.append(_median_seconds(step, draft.parallel, engine.device))
    times = _of_the_leader(seconds, draft.parallel, engine.device)
    return StepCosts({batch: {batch * draft.width: value} for batch, value in zip(batches, times)})


def _median_seconds(step: Callable[[], object], parallel: ParallelLayout, device: torch.device) -> float:
    samples = []
    for _ in range(_WARM_UPS + _SAMPLES):
        started = time.perf_counter()
        step()
        parallel.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples.append(time.perf_counter() - started)
    return statistics.median(samples[_WARM_UPS:])


def _of_the_leader(seconds: list[float], parallel: ParallelLayout, device: torch.device) -> list[float]:
    """Ranks that weighed different times would choose different steps."""
    return parallel.fetch(parallel.broadcast(torch.tensor(seconds, dtype=torch.float64, device=device))).tolist()
