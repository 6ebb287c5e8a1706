# SPDX-License-Identifier: Apache-2.0
"""Small helpers that every pass uses to read and edit a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from dcp_compile.errors import InvariantError
from dcp_compile.ops import exchange, markers, metadata

if TYPE_CHECKING:
    from dcp_compile._compat import FakeTensorMode

dcp = torch.ops.dcp
aten = torch.ops.aten

MARKERS = frozenset(getattr(dcp, name).default for name in markers.NAMES)
METADATA = frozenset(getattr(dcp, name).default for name in metadata.NAMES)
EXCHANGES = frozenset(getattr(dcp, name).default for name in exchange.NAMES)


def value(node: fx.Node) -> Any:
    """Fake value of a node."""
    return node.meta["val"]


def hint(size: int | torch.SymInt) -> int:
    """Concrete size at which the graph was traced."""
    return size if isinstance(size, int) else int(size.node.hint)


def is_size(node: fx.Node) -> bool:
    """Whether a node is a number read from or computed from shapes."""
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def location(node: fx.Node) -> str:
    """Module path a node was traced from, such as ``model.layers.3.self_attn``; its own name when unknown."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return node.name
    return stack[-1][0]


def fake_mode(graph: fx.Graph) -> FakeTensorMode:
    """Fake-tensor mode the graph was traced in."""
    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta["val"], torch.Tensor):
            return node.meta["val"].fake_mode
    raise InvariantError("the graph has no tensor input")


class Emitter:
    """Adds calls to a graph, with their fake values, where the surrounding ``graph.inserting_*`` context says."""

    def __init__(self, graph: fx.Graph, like: fx.Node):
        self.graph = graph
        self.mode = fake_mode(graph)
        self.stack = like.meta.get("nn_module_stack")

    def __call__(self, target, *args, **kwargs) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        with self.mode:
            node.meta["val"] = target(*fx.map_arg(args, value), **fx.map_arg(kwargs, value))
        if self.stack is not None:
            node.meta["nn_module_stack"] = self.stack
        return node


def nodes_of(graph: fx.Graph, *targets) -> list[fx.Node]:
    """Calls of the given operators, in graph order."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


def cone(outputs: Iterable[fx.Node], cuts: Iterable[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
    """All data ``outputs`` depend on, stopping at ``cuts``, sizes and graph inputs: (interior nodes, leaves).

    A cache marker hands its first two operands through; its others do not reach its results.
    """
    cuts, interior, leaves, pending = set(cuts), set(), set(), list(outputs)
    while pending:
        node = pending.pop()
        if node in interior or node in leaves:
            continue
        if node in cuts or node.op in ("placeholder", "get_attr") or is_size(node):
            leaves.add(node)
            continue
        interior.add(node)
        pending += node.args[:2] if node.target is dcp.mark_latent.default else node.all_input_nodes
    return interior, leaves


def erase_unused(graph: fx.Graph, candidates: Iterable[fx.Node]) -> int:
    """Erase those of ``candidates`` that nothing uses any more, users before producers."""
    candidates, erased = set(candidates), 0
    for node in reversed(list(graph.nodes)):
        if node in candidates and not node.users:
            graph.erase_node(node)
            erased += 1
    return erased


def census(graph: fx.Graph) -> Counter[str]:
    """Calls per operator."""
    names = Counter()
    for node in graph.nodes:
        if node.op == "call_function":
            target = node.target
            names[target.name().removesuffix(".default") if hasattr(target, "name") else target.__name__] += 1
    return names
