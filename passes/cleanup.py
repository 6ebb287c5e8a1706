# SPDX-License-Identifier: Apache-2.0
"""Remove what the other passes left behind: dead nodes and views that change nothing."""

from __future__ import annotations


from dcp_compile.capture import StepGraph
from dcp_compile.errors import InvariantError

from .context import PassContext, PassResult
from .graph_tools import aten, dcp, nodes_of, value


def run(graph: StepGraph, context: PassContext) -> PassResult:
    """Views first, then dead code; writes survive because their operators are mutable."""
    matches = 0
    for node in nodes_of(graph.graph, aten.view.default, aten.reshape.default, aten._unsafe_view.default):
        source = node.args[0]
        if node.users and _same_layout(value(node), value(source)):
            node.replace_all_uses_with(source)
            matches += 1
    before = len(graph.graph.nodes)
    graph.graph.eliminate_dead_code()
    return PassResult("cleanup", matches + before - len(graph.graph.nodes))


def check(graph: StepGraph, context: PassContext) -> None:
    """Nothing unused is left, and no write was dropped."""
    unused = [
        node.name
        for node in graph.graph.nodes
        if node.op == "call_function" and not node.users and not node.is_impure()
    ]
    if unused:
        raise InvariantError(f"cleanup: unused nodes left: {unused}")
    if len(nodes_of(graph.graph, dcp.kv_write.default)) != len(graph.sites):
        raise InvariantError("cleanup: a cache write was dropped")


def _same_layout(found, wanted) -> bool:
    return (
        found.dtype == wanted.dtype
        and str(list(found.shape)) == str(list(wanted.shape))
        and str(list(found.stride())) == str(list(wanted.stride()))
    )
