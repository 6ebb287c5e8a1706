# SPDX-License-Identifier: Apache-2.0
"""Compiling a body by regions: equal ones, such as those of equal layers, are compiled once.

Operators that a compiler cannot look into (attention, recurrences, cache writes, collectives) are called directly. What
lies between two of them is cut before matrix products, where nothing would be fused anyway, and pieces that always occur
together are joined again: what stays apart is what layers share and what tells them apart. Regions exchange whole
tensors; views and sizes are taken anew wherever they are used.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

from torch import Tensor, fx, nn

from . import _compat
from .passes.graph_tools import is_size

Compiler = Callable[[fx.GraphModule, list], Callable]
"""``compiler(functional graph, example inputs) -> callable on such inputs, returning a sequence of outputs``."""

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_grouped_mm"})


@dataclass(frozen=True)
class Region:
    """Consecutive calls of a body that are compiled together.

    Attributes:
        inputs: tensors of the body that it reads. outputs: those of its tensors that are read elsewhere.
        nodes: its calls in order, with the views and sizes they need.
        fingerprint: regions of equal fingerprints compute the same on their inputs.
    """

    inputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    fingerprint: str


@dataclass
class RegionCompiler:
    """Compiles what it has not met before.

    Attributes:
        compiled: callables by fingerprint. regions: regions met so far, equal ones included.
    """

    compiler: Compiler
    compiled: dict[str, nn.Module] = field(default_factory=dict)
    regions: int = 0

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        """``module`` with every region replaced by one call of a compiled callable.

        One instance serves bodies that share their symbols, such as two rewritings of one captured step.
        """
        body = Body(module.graph)
        regions = [region for region in body.regions() if region.outputs]
        self.regions += len(regions)
        for region in regions:
            if region.fingerprint not in self.compiled:
                # Equal layers share fake values, but one callable must not be told that two of its inputs are one tensor.
                inputs = [_unshared(node.meta["val"]) for node in region.inputs]
                self.compiled[region.fingerprint] = _Called(self.compiler(_extract(module, region), inputs))
        return _assemble(module, body, regions, self.compiled)


class _Called(nn.Module):
    """A compiled callable as a module, which is what a graph can call."""

    def __init__(self, run: Callable):
        super().__init__()
        self.run = run

    def forward(self, *arguments: Tensor) -> Sequence[Tensor]:
        return self.run(*arguments)


def is_operator(node: fx.Node) -> bool:
    """Whether a compiler cannot look into a call: all that is not ATen, and taking a result out of such a call."""
    if node.target is operator.getitem:
        return is_operator(node.args[0])
    return getattr(node.target, "namespace", "aten") != "aten"


def is_free(node: fx.Node) -> bool:
    """Whether a call computes nothing: sizes, and views of an operand."""
    if is_size(node):
        return True
    if node.target is operator.getitem:
        return is_free(node.args[0])
    if _compat.may_copy(node.target):
        return _compat.same_storage(node.meta["val"], node.args[0].meta["val"])
    return _compat.is_view(node.target)


class Body:
    """Where a graph can be cut, and what is read where.

    Attributes:
        free: calls that are repeated where they are used.
        readers: calls that read a tensor, be it through free ones.
        stretches: all other calls between two operators, in pieces: one or more matrix products in a row and what follows them.
    """

    def __init__(self, graph: fx.Graph):
        self.free: set[fx.Node] = set()
        self.readers: dict[fx.Node, set[fx.Node]] = defaultdict(set)
        self.stretches: list[list[list[fx.Node]]] = [[]]
        self._bound: dict[object, fx.Node] = {}  # a symbol -> a graph input that has it as a size
        behind: dict[fx.Node, frozenset[fx.Node]] = {}  # a free call -> the tensors it is taken from
        home: dict[fx.Node, list[fx.Node]] = {}  # a call -> its piece
        for node in graph.nodes:
            if node.op == "placeholder":
                self._bound |= {symbol: node for symbol in _compat.symbols(node.meta["val"])[0]}
            bases = frozenset().union(*(behind.get(operand, {operand}) for operand in node.all_input_nodes))
            if node.op == "call_function" and not is_operator(node) and is_free(node):
                self.free.add(node)
                behind[node] = bases
                continue
            for base in bases:
                self.readers[base].add(node)
            if node.op != "call_function":
                continue
            if is_operator(node):
                if self.stretches[-1]:
                    self.stretches.append([])
            elif node.target is operator.getitem:
                home[node.args[0]].append(node)
            else:
                if not self.stretches[-1] or (_is_product(node) and not _is_product(self.stretches[-1][-1][-1])):
                    self.stretches[-1].append([])
                home[node] = self.stretches[-1][-1]
                home[node].append(node)

    def regions(self) -> list[Region]:
        """Pieces that always follow each other are one region."""
        names = [[None, *(self.region(piece).fingerprint for piece in pieces), None] for pieces in self.stretches]
        after, before = defaultdict(set), defaultdict(set)
        for name, follower in chain.from_iterable(pairwise(stretch) for stretch in names):
            after[name].add(follower)
            before[follower].add(name)
        runs: list[list[fx.Node]] = []
        for pieces, stretch in zip(self.stretches, names):
            for piece, (last, name) in zip(pieces, pairwise(stretch)):
                if last is not None and after[last] == {name} and before[name] == {last}:
                    runs[-1] += piece
                else:
                    runs.append(list(piece))
        return [self.region(run) for run in runs]

    def region(self, calls: Sequence[fx.Node]) -> Region:
        """The region made of ``calls``, which follow each other in the graph."""
        numbers: dict[fx.Node, int] = {}
        inputs, nodes, text = [], [], []

        def reference(node: fx.Node) -> _Numbered:
            if node not in numbers:
                if node in self.free:
                    add(node)
                else:
                    inputs.append(node)
                    text.append(_describe(node.meta["val"]))
                    numbers[node] = len(numbers)
            return _Numbered(numbers[node])

        def add(node: fx.Node) -> None:
            arguments = fx.map_arg((node.args, node.kwargs), reference)
            nodes.append(node)
            text.append(f"{node.target} {arguments}")
            numbers[node] = len(numbers)

        for node in calls:
            add(node)
        for symbol in self._unbound(inputs):
            reference(self._bound[symbol])
        inside = set(calls)
        outputs = tuple(node for node in calls if isinstance(node.meta["val"], Tensor) and self.readers[node] - inside)
        text.append(str([numbers[node] for node in outputs]))
        return Region(tuple(inputs), tuple(nodes), outputs, "\n".join(text))

    def _unbound(self, inputs: list[fx.Node]) -> list:
        """Symbols in the inputs' sizes that are no size by themselves: a compiled callable could not tell their values."""
        known, used = set(), set()
        for node in inputs:
            sizes, everywhere = _compat.symbols(node.meta["val"])
            known |= sizes
            used |= everywhere
        return sorted(used - known, key=str)


@dataclass(frozen=True)
class _Numbered:
    """Stands for an operand in a fingerprint."""

    number: int

    def __repr__(self) -> str:
        return f"%{self.number}"


def _is_product(node: fx.Node) -> bool:
    return hasattr(node.target, "name") and node.target.name().removeprefix("aten::").partition(".")[0] in _PRODUCTS


def _unshared(value: Tensor) -> Tensor:
    with value.fake_mode:
        return value.new_empty_strided(value.shape, value.stride())


def _describe(value: Tensor) -> str:
    return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()} {value.storage_offset()}"


def _extract(module: fx.GraphModule, region: Region) -> fx.GraphModule:
    """A region as a graph of its own; its names do not depend on where it lies."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"input_{index}") for index, node in enumerate(region.inputs)}
    for index, node in enumerate(region.nodes):
        arguments, keywords = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = graph.create_node("call_function", node.target, arguments, keywords, f"call_{index}")
    graph.output(tuple(copies[node] for node in region.outputs))
    return fx.GraphModule(module, graph)


def _assemble(
    module: fx.GraphModule, body: Body, regions: list[Region], compiled: Mapping[str, nn.Module]
) -> fx.GraphModule:
    """The body as calls of operators and compiled regions."""
    names = {fingerprint: f"region_{index}" for index, fingerprint in enumerate(compiled)}
    starts = {next(node for node in region.nodes if node not in body.free): region for region in regions}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = graph.node_copy(node, copy)
        return copies[node]

    for node in module.graph.nodes:
        if node in starts:
            region = starts[node]
            results = graph.call_module(names[region.fingerprint], tuple(copy(operand) for operand in region.inputs))
            for index, output in enumerate(region.outputs):
                copies[output] = graph.call_function(operator.getitem, (results, index))
        elif node.op == "placeholder" or (node.op == "call_function" and is_operator(node)):
            copy(node)
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], copy))
    root = nn.Module()
    for node in graph.find_nodes(op="get_attr"):
        root.register_buffer(node.target, getattr(module, node.target))
    for fingerprint, callable_ in compiled.items():
        root.add_module(names[fingerprint], callable_)
    return fx.GraphModule(root, graph)
