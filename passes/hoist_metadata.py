# SPDX-License-Identifier: Apache-2.0
"""Move everything that depends on step metadata alone into one prologue graph.

After common subexpressions are shared, every node whose only leaves are positions, block table, lengths and slots
moves, and the metadata operators among them become one fused operator. The prologue runs once per step; the body
receives its results as extra inputs, whatever the number of layers.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from dcp_compile.capture import METADATA_INPUTS, StepGraph
from dcp_compile.errors import InvariantError

from .context import PassContext, PassResult
from .graph_tools import METADATA, Emitter, dcp, nodes_of, value


def run(graph: StepGraph, context: PassContext) -> PassResult:
    """Cut the metadata nodes out of the body into ``graph.prologue``."""
    if graph.prologue is not None:
        return PassResult("hoist_metadata", 0)
    hoistable = _hoistable(graph)
    shared = _share_common(graph.graph, hoistable)
    outputs = [
        node
        for node in shared
        if isinstance(value(node), torch.Tensor) and any(user not in shared for user in node.users)
    ]
    needed = set(outputs)
    for node in reversed(shared):
        if node in needed:
            needed.update(operand for operand in node.all_input_nodes if operand in shared)
    graph.prologue, graph.prologue_inputs = _cut_out(graph, needed, outputs)
    _feed_body(graph, outputs)
    for node in reversed(shared):
        if not node.users:
            graph.graph.erase_node(node)
    fused = _fuse(graph.prologue, graph, context)
    return PassResult("hoist_metadata", len(outputs) + fused)


def check(graph: StepGraph, context: PassContext) -> None:
    """No metadata operator in the body, one in the prologue, which reads step inputs only."""
    left = nodes_of(graph.graph, *METADATA)
    if left:
        raise InvariantError(f"hoist_metadata: {len(left)} metadata operators left in the body: {left}")
    fused = nodes_of(graph.prologue.graph, *METADATA)
    if graph.sites and len(fused) != 1:
        raise InvariantError(f"hoist_metadata: {len(fused)} metadata operators in the prologue, not 1")
    for node in graph.prologue_inputs:
        if graph.step_inputs.get(node) not in METADATA_INPUTS:
            raise InvariantError(f"hoist_metadata: the prologue reads {node.name}, which is not step metadata")


def _hoistable(graph: StepGraph) -> list[fx.Node]:
    """Nodes that depend on metadata inputs and on nothing else."""
    moving = {node for node, name in graph.step_inputs.items() if name in METADATA_INPUTS}
    found: list[fx.Node] = []
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.is_impure():
            continue
        operands = node.all_input_nodes
        if operands and all(operand in moving for operand in operands):
            found.append(node)
            moving.add(node)
    return found


def _share_common(graph: fx.Graph, nodes: list[fx.Node]) -> list[fx.Node]:
    """Replace equal calls by the first of them; returns the survivors."""
    first: dict[tuple, fx.Node] = {}
    kept = []
    for node in nodes:
        key = (node.target, repr(node.args), repr(node.kwargs))
        if key in first:
            node.replace_all_uses_with(first[key])
            graph.erase_node(node)
        else:
            first[key] = node
            kept.append(node)
    return kept


def _cut_out(graph: StepGraph, moved: set[fx.Node], outputs: list[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node]]:
    """A graph that computes ``outputs`` by the nodes ``moved``, and the body placeholders it takes."""
    prologue = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    needed = {operand for node in moved for operand in node.all_input_nodes if operand not in moved}
    inputs = [node for node in graph.graph.nodes if node in needed]
    for node in inputs:
        copied[node] = prologue.placeholder(node.name)
        copied[node].meta = dict(node.meta)
    for node in graph.graph.nodes:
        if node in moved:
            copied[node] = prologue.node_copy(node, copied.__getitem__)
    prologue.output(tuple(copied[node] for node in outputs))
    return fx.GraphModule(graph.module, prologue), inputs


def _feed_body(graph: StepGraph, outputs: list[fx.Node]) -> None:
    """Give the body one placeholder per prologue output, after all others."""
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    for index, node in enumerate(outputs):
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"metadata_{index}")
        last.meta["val"] = value(node)
        node.replace_all_uses_with(last)


# What each fused operator replaces, in the order of its results.
_FUSED = {
    True: (dcp.step_metadata, (dcp.row_bounds, dcp.row_requests, dcp.cp_local_slot, dcp.prefix_bounds)),
    False: (dcp.block_metadata, (dcp.block_bounds, dcp.row_requests, dcp.cp_local_slot, dcp.prefix_bounds)),
}


def _fuse(prologue: fx.GraphModule, graph: StepGraph, context: PassContext) -> int:
    """Replace the separate metadata operators by one."""
    nodes = prologue.graph
    fused_target, parts_of = _FUSED[context.causal]
    targets = [target.default for target in parts_of]
    separate = nodes_of(nodes, *targets)
    if not separate:
        return 0
    inputs = {
        graph.step_inputs.get(body): node
        for body, node in zip(graph.prologue_inputs, nodes.find_nodes(op="placeholder"))
    }
    if "prefix_lengths" not in inputs:  # the flattened layout does not read it; the fused operator does
        body = next(node for node, name in graph.step_inputs.items() if name == "prefix_lengths")
        with nodes.inserting_after(nodes.find_nodes(op="placeholder")[-1]):
            inputs["prefix_lengths"] = nodes.placeholder(body.name)
        inputs["prefix_lengths"].meta = dict(body.meta)
        graph.prologue_inputs.append(body)
    emit = Emitter(nodes, like=separate[0])
    with nodes.inserting_before(separate[0]):
        fused = emit(
            fused_target.default,
            *(inputs[name] for name in ("positions", "block_table", "prefix_lengths")),
            context.block_size,
            context.rank,
            context.dcp_size,
            context.interleave,
        )
        parts = [emit(operator.getitem, fused, index) for index in range(len(targets))]
    for node in separate:
        node.replace_all_uses_with(parts[targets.index(node.target)])
        nodes.erase_node(node)
    nodes.eliminate_dead_code()
    nodes.lint()
    prologue.recompile()
    return 1
