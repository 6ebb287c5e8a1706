# SPDX-License-Identifier: Apache-2.0
"""Replaying step programs as CUDA graphs.

One graph per bucket (requests, rows per request); those of an engine's step and verify programs share one memory pool. Inputs
live in buffers the bucket owns; a smaller batch fills the rest with padded requests (position -1, state slot -1), which write
nothing. Warm-up and capture run on padded requests only, so they leave KV caches and recurrent state as they were.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import CaptureError
from ..lower import StepProgram
from .planning import Plans, StandingPlan, Unplanned, planned

_WIDE = ("input_ids", "positions", "prefix_lengths")
_NARROW = ("block_table", "state_slots", "accepted")
_NEUTRAL = {"positions": -1, "state_slots": -1}
_WARM_UPS = 3

Result = TypeVar("Result")


class Staging:
    """Static inputs of one bucket: pinned host memory, its device twin, and a view per input in both."""

    def __init__(self, batch: int, rows: int, columns: int, device: torch.device):
        shapes = {
            "input_ids": (batch * rows,),
            "positions": (batch, rows),
            "prefix_lengths": (batch,),
            "block_table": (batch, columns),
            "state_slots": (batch,),
            "accepted": (batch,),
        }
        self.host: dict[str, Tensor] = {}
        self.device: dict[str, Tensor] = {}
        self._pairs = []
        for names, dtype in ((_WIDE, torch.int64), (_NARROW, torch.int32)):
            sizes = [torch.Size(shapes[name]).numel() for name in names]
            host = torch.zeros(sum(sizes), dtype=dtype, pin_memory=True)
            twin = torch.zeros(sum(sizes), dtype=dtype, device=device)
            self._pairs.append((host, twin))
            for name, part, twin_part in zip(names, host.split(sizes), twin.split(sizes)):
                self.host[name] = part.view(shapes[name])
                self.device[name] = twin_part.view(shapes[name])
        self._sent = torch.cuda.Event()
        self._sent.record()
        self.fill({})

    def fill(self, inputs: Mapping[str, Tensor]) -> None:
        """Put the inputs in place, padded; fewer requests or rows are allowed, none at all as well.

        Inputs of the host are sent in two copies; those of the device never come near it.
        """
        if inputs and inputs["positions"].is_cuda:
            _place(inputs, self.device)
            return
        self._sent.synchronize()  # the last copy must be done with the pinned memory
        _place(inputs, self.host)
        for host, twin in self._pairs:
            twin.copy_(host, non_blocking=True)
        self._sent.record()


def _place(inputs: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Copy inputs into the buffers of their names and fill what they leave free with what is neutral."""
    used = inputs["positions"].shape if inputs else torch.Size((0, 0))
    for name, buffer in buffers.items():
        corner = _corner(buffer, buffers["positions"].shape, used, name)
        if corner.numel() < buffer.numel():
            buffer.fill_(_NEUTRAL.get(name, 0))
        if inputs:
            corner.copy_(inputs[name].view(corner.shape))


def _corner(buffer: Tensor, full: torch.Size, used: torch.Size, name: str) -> Tensor:
    """The part of a padded buffer that ``used`` requests and rows fill."""
    batch, rows = used
    if name == "input_ids":
        return buffer.view(full)[:batch, :rows]
    return buffer[:batch, :rows] if name == "positions" else buffer[:batch]


@dataclass
class Bucket:
    """A captured step. A graph owns only what was allocated inside its capture: everything else it reads is kept here."""

    staging: Staging
    plan: StandingPlan | Unplanned
    logit_rows: Tensor
    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, ...]


class GraphRunner:
    """Runs a step program by replay where a bucket fits, else directly.

    Args:
        program: as lowered. widths: query rows per request of its buckets. batches: requests of its buckets.
        columns: block-table width. all_rows: whether logits of all rows are wanted, or of each request's last row.
        pool: memory pool that the graphs of an engine share. plans: makes each bucket's plan of prefixes.

    Raises:
        CaptureError: the program cannot be captured; the failing call is named.
    """

    def __init__(
        self,
        program: StepProgram,
        widths: list[int],
        batches: list[int],
        columns: int,
        all_rows: bool,
        device: torch.device,
        pool: tuple[int, int],
        plans: Plans = Unplanned,
    ):
        self._program, self._device, self._all_rows, self._plans = program, device, all_rows, plans
        self._direct = planned(program, plans(None))
        largest_first = itertools.product(sorted(batches, reverse=True), sorted(widths, reverse=True))
        self._buckets = {place: self._capture(*place, columns, pool) for place in largest_first}

    def __call__(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        batch, rows = inputs["positions"].shape
        place = smallest_bucket(self._buckets, batch, rows)
        if place is None:
            return self._direct(inputs)
        bucket = self._buckets[place]
        bucket.staging.fill(bucket.plan.prepare(inputs))
        bucket.graph.replay()
        if not self._all_rows:
            return tuple(out[:batch] for out in bucket.outputs)
        return tuple(out.unflatten(0, place)[:batch, :rows].flatten(0, 1) for out in bucket.outputs)

    def bucket(self, batch: int, rows: int) -> Bucket:
        """The captured step of exactly ``batch`` requests x ``rows`` rows; its graph replays on what the last call filled in."""
        return self._buckets[batch, rows]

    def _capture(self, batch: int, rows: int, columns: int, pool: tuple[int, int]) -> Bucket:
        staging = Staging(batch, rows, columns, self._device)
        plan = self._plans((batch, rows, columns))
        plan.prepare(staging.host)
        total = batch * rows
        wanted = range(total) if self._all_rows else range(rows - 1, total, rows)
        logit_rows = torch.tensor(list(wanted), device=self._device)

        def run() -> tuple[Tensor, ...]:
            positions = staging.device["positions"].view(-1).clamp_min(0)
            with plan:
                return self._program({**staging.device, "row_positions": positions, "logit_rows": logit_rows})

        graph, outputs = _record(run, pool, f"a step of {batch} requests x {rows} rows")
        return Bucket(staging, plan, logit_rows, graph, outputs)


class ReplayedCall:
    """A function of device tensors, captured once per bucket of its leading sizes.

    Each input lives in a buffer that the bucket owns; what a smaller call leaves free of it holds the input's neutral
    value, with which the function must not write anything.

    Args:
        function: of the inputs in order; returns a tensor that begins with the first leading size, or None.
        places: leading sizes of the buckets.
        inputs: per place, the shape, dtype and neutral value of every input.
        pool: memory pool of the graphs.

    Raises:
        CaptureError: the function cannot be captured.
    """

    def __init__(
        self,
        function: Callable[..., Tensor | None],
        places: Iterable[tuple[int, ...]],
        inputs: Callable[..., Sequence[tuple[tuple[int, ...], torch.dtype, int]]],
        device: torch.device,
        pool: tuple[int, int],
    ):
        self._buckets = {}
        for place in sorted(places, reverse=True):
            neutral = [value for *_, value in inputs(*place)]
            buffers = [torch.full(shape, value, dtype=dtype, device=device) for shape, dtype, value in inputs(*place)]
            what = f"{function.__name__.strip('_')} for sizes {place}"
            graph, result = _record(lambda: function(*buffers), pool, what)
            self._buckets[place] = buffers, neutral, graph, result

    def holds(self, *place: int) -> bool:
        """Whether a bucket is large enough for these leading sizes."""
        return smallest_bucket(self._buckets, *place) is not None

    def __call__(self, place: tuple[int, ...], *inputs: Tensor) -> Tensor | None:
        """Replay for inputs of the leading sizes ``place``, on any device; the result is overwritten by the next call."""
        buffers, neutral, graph, result = self._buckets[smallest_bucket(self._buckets, *place)]
        for buffer, value, given in zip(buffers, neutral, inputs):
            if given.shape != buffer.shape:
                buffer.fill_(value)
            buffer[tuple(slice(size) for size in given.shape)].copy_(given, non_blocking=True)
        graph.replay()
        return None if result is None else result[: place[0]]


def _record(run: Callable[[], Result], pool: tuple[int, int], what: str) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Warm up on a side stream, as capture wants it, then capture; CaptureError says that ``what`` cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool):
            result = run()
    except Exception as error:
        raise CaptureError(
            f"{what} cannot be captured as a CUDA graph: {error}. Pass cuda_graphs=False to run without graphs"
        ) from error
    return graph, result


def smallest_bucket(places: Iterable[tuple[int, ...]], *sizes: int) -> tuple[int, ...] | None:
    """The least of ``places`` (requests, rows per request, ...) of which every size is at least the given one, if any is."""
    return min((place for place in places if all(have >= want for have, want in zip(place, sizes))), default=None)


def buckets(most: int) -> list[int]:
    """1, 2, 4, ... and ``most`` itself."""
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return sorted({*sizes, most})
