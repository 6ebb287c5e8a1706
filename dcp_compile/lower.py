# SPDX-License-Identifier: Apache-2.0
"""From a rewritten step graph to a callable on step inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, fx

from .capture import StateRef, StepGraph
from .regions import RegionCompiler

StepProgram = Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]]
"""``program(step inputs by name, on any device) -> graph outputs``; writes land in the state tensors it was bound to."""


def allocate_states(graphs: list[StepGraph]) -> dict[StateRef, Tensor]:
    """Zeroed tensors for every state input of the graphs, in the shapes and types the passes gave them."""
    states: dict[StateRef, Tensor] = {}
    for graph in graphs:
        for node, ref in graph.states.items():
            fake = node.meta["val"]
            if ref not in states:
                states[ref] = torch.zeros(tuple(fake.shape), dtype=fake.dtype, device=fake.device)
    return states


def lower(graph: StepGraph, states: Mapping[StateRef, Tensor], regions: RegionCompiler | None) -> StepProgram:
    """Bind prologue and body to the states and the model's constants.

    Args:
        regions: compiles the body, for any number of rows; what it compiled before, for another rewriting of the same
            captured step, is used again. None: the body runs node by node, the default on a CPU. The prologue is a
            single fused operator already.
    """
    body = graph.module if regions is None else regions(graph.module)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    readers = [_reader(graph, node, states) for node in placeholders if node in _known(graph)]
    prologue_readers = [_reader(graph, node, states) for node in graph.prologue_inputs]
    prologue = graph.prologue

    def run(inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            metadata = prologue(*[read(inputs) for read in prologue_readers])
            return body(*[read(inputs) for read in readers], *metadata)

    return run


def _known(graph: StepGraph) -> set[fx.Node]:
    return {*graph.step_inputs, *graph.states, *graph.constants}


def _reader(
    graph: StepGraph, node: fx.Node, states: Mapping[StateRef, Tensor]
) -> Callable[[Mapping[str, Tensor]], object]:
    """How one graph input is obtained from the step inputs."""
    if node in graph.step_inputs:
        name, device = graph.step_inputs[node], node.meta["val"].device
        return lambda inputs: inputs[name].to(device)
    tensor = states[graph.states[node]] if node in graph.states else graph.constants[node]
    return lambda inputs: tensor
