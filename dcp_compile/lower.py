# SPDX-License-Identifier: Apache-2.0
"""From a rewritten step graph to a callable on step inputs."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from itertools import chain

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from .capture import Joined, StateRef, StepGraph
from .errors import CapacityError
from .regions import RegionCompiler

StepProgram = Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]]
"""``program(step inputs by name, on any device) -> graph outputs``; writes land in the state tensors it was bound to."""


def allocate_states(graphs: list[StepGraph]) -> dict[StateRef, Tensor]:
    """Zeroed tensors for every state input of the graphs, in the shapes and types the passes gave them.

    Raises:
        CapacityError: the device has no room for all of them.
    """
    wanted: dict[StateRef, Tensor] = {}
    for node, ref in chain.from_iterable(graph.states.items() for graph in graphs):
        wanted.setdefault(ref, node.meta["val"])
    try:
        return {ref: torch.zeros(tuple(like.shape), dtype=like.dtype, device=like.device) for ref, like in wanted.items()}
    except RuntimeError as error:  # out of memory
        total = sum(math.prod(like.shape) * like.dtype.itemsize for like in wanted.values())
        raise CapacityError(
            f"KV caches and recurrent states of {total / 2**30:.1f} GiB do not fit: {str(error).splitlines()[0]}; call "
            "optimize() with a smaller max_seq_len or max_batch_size"
        ) from error


def lower(
    graphs: list[StepGraph], states: Mapping[StateRef, Tensor], regions: RegionCompiler | None
) -> list[StepProgram]:
    """Bind prologue and body of each graph to the states and the model's constants.

    Parameters that are read as one are made one in memory, after everything has been compiled: until then nothing of
    the model has changed, and their values never do.

    Args:
        regions: compiles the bodies, for any number of rows; what it compiled before, for another rewriting of the same
            captured step, is used again. None: they run node by node, the default on a CPU. The prologue is a single
            fused operator already.
    """
    bodies = [graph.module if regions is None else regions(graph.module) for graph in graphs]
    for graph in graphs:
        join_weights(graph)
    return [_bind(graph, body, states) for graph, body in zip(graphs, bodies)]


# The joined weight by the first of its parameters, as long as some program reads it.
_wholes: MutableMapping[nn.Parameter, weakref.ref[Tensor]] = WeakIdKeyDictionary()


def join_weights(graph: StepGraph) -> None:
    """Replace every :class:`Joined` constant by one tensor, of which its parameters are rows from then on.

    Where they are already, this changes nothing. Else the parameters stay the same objects with the same values, and
    their old storages go, so that no more than the parameters of one product are held twice at a time. Each parameter
    has a storage of its own, over its rows: what saves a model tells by storages which tensors are one. All other
    constants become plain tensors: programs hold values, not the model's objects.
    """
    moved = False
    for node, constant in graph.constants.items():
        if isinstance(constant, Joined):
            whole = _joined_before(constant.parts)
            if whole is None:
                moved, whole = True, _join(constant.parts)
            graph.constants[node] = whole
        else:
            graph.constants[node] = constant.detach()
    if moved and torch.cuda.is_available():
        torch.cuda.empty_cache()  # the old storages, for allocations that do not come from PyTorch


def _joined_before(parts: tuple[nn.Parameter, ...]) -> Tensor | None:
    known = _wholes.get(parts[0])
    whole = known and known()
    if whole is None or len(whole) != sum(map(len, parts)):
        return None
    rows = whole.split([len(part) for part in parts])
    return whole if all(part.data_ptr() == own.data_ptr() for part, own in zip(parts, rows)) else None


def _join(parts: tuple[nn.Parameter, ...]) -> Tensor:
    whole = parts[0].detach().new_empty(sum(map(len, parts)), parts[0].shape[1])
    for part, rows in zip(parts, whole.split([len(part) for part in parts])):
        rows.copy_(part.detach())
        part.data = torch.from_dlpack(rows)
    _wholes[parts[0]] = weakref.ref(whole)
    return whole


def _bind(graph: StepGraph, body: Callable, states: Mapping[StateRef, Tensor]) -> StepProgram:
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    known = {*graph.step_inputs, *graph.states, *graph.constants}
    readers = [_reader(graph, node, states) for node in placeholders if node in known]
    prologue_readers = [_reader(graph, node, states) for node in graph.prologue_inputs]
    prologue = graph.prologue

    def run(inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            metadata = prologue(*[read(inputs) for read in prologue_readers])
            return body(*[read(inputs) for read in readers], *metadata)

    return run


def _reader(
    graph: StepGraph, node: fx.Node, states: Mapping[StateRef, Tensor]
) -> Callable[[Mapping[str, Tensor]], object]:
    """How one graph input is obtained from the step inputs."""
    if node in graph.step_inputs:
        name, device = graph.step_inputs[node], node.meta["val"].device
        return lambda inputs: inputs[name].to(device)
    tensor = states[graph.states[node]] if node in graph.states else graph.constants[node]
    return lambda inputs: tensor
