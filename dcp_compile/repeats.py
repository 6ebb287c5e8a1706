# SPDX-License-Identifier: Apache-2.0
"""Tracing equal layers once.

Two modules are of one kind if they are built alike and called alike. The first two of a kind are traced between
``mark_enter`` and ``mark_leave``; every later one is a single ``mark_repeat``, for which the calls of the second are copied
into the traced graph, with its own weights, states and layer number. That is done only if the first two agree call by
call. Whatever is out of the ordinary is refused: the model is then traced again, and that module in full.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from . import _compat
from .kinds import LayerNumber, Place, describe, places_of, sign
from .ops.markers import LAYER_ARGUMENT

dcp = torch.ops.dcp
Name = str | tuple[int, str]
"""A weight by its name in the model, the state of a layer as (layer, kind), or another input by a name."""

ENTER, LEAVE, REPEAT = dcp.mark_enter.default, dcp.mark_leave.default, dcp.mark_repeat.default


@dataclass
class _Call:
    """One traced call of a module.

    Attributes:
        results: per leaf of what it returned: ("input", i), ("output", i) or ("value", what).
        outputs: tensors it made. structure: how the leaves make up what it returned.
    """

    number: int
    place: Place
    results: list[tuple[str, Any]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    structure: Any = None


@dataclass
class _Segment:
    """The calls between two marks."""

    enter: fx.Node
    nodes: list[fx.Node] = field(default_factory=list)
    leave: fx.Node | None = None

    def inputs(self) -> dict[fx.Node, int]:
        return {user: user.args[1] for user in self.enter.users if user.target is operator.getitem}


class Repeats:
    """What is traced and what is copied, in one trace after another until one holds.

    Attributes:
        refused: paths of modules that are traced in full.
        copied: modules of the last trace whose calls were copied.
    """

    def __init__(self, model: nn.Module):
        """Before anything in ``model`` is replaced for the trace."""
        self.places = places_of(model)
        self.refused: set[str] = set()
        self.copied = 0
        self._kinds: dict[object, list[_Call]] = {}
        self._repeats: dict[int, Place] = {}
        self._open: list[Place] = []
        self._watched: list[tuple[Place, Tensor]] = []
        self._numbers = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Calls of repeatable modules come through here while the model is traced."""
        self._kinds, self._repeats, self._open, self._watched, self._numbers = {}, {}, [], [], 0
        replaced: list[tuple[dict, str, object]] = []

        def replace(module: nn.Module, name: str, new: object) -> None:
            replaced.append((vars(module), name, vars(module).get(name)))
            vars(module)[name] = new

        try:
            layers = 1 + max((place.layer for place in self.places.values() if place.layer is not None), default=0)
            for module, place in self.places.items():
                replace(module, "forward", functools.partial(self._run, place, module.forward))
                for part in module.modules():
                    if type(vars(part).get("layer_idx")) is int:
                        replace(part, "layer_idx", LayerNumber(part.layer_idx, layers, self._refuse_open))
            yield
        finally:
            for attributes, name, old in reversed(replaced):
                if old is None:
                    del attributes[name]
                else:
                    attributes[name] = old

    def _refuse_open(self) -> None:
        self.refused |= {place.path for place in self._open}

    def _watch(self, place: Place, tensors) -> None:
        """Refuse ``place`` if one of the tensors is written to during the trace."""
        self._watched += [(place, tensor) for tensor in tensors]

    def _run(self, place: Place, forward: Callable, *args, **kwargs):
        leaves, structure = _compat.flatten((args, kwargs))
        tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
        if place.path in self.refused or not tensors:
            return forward(*args, **kwargs)
        order = {id(tensor): index for index, tensor in enumerate(tensors)}
        kind = (
            place.build,
            str(structure),
            *(describe(tensor) for tensor in tensors),
            *(order[id(leaf)] if isinstance(leaf, Tensor) else sign(leaf, {}) for leaf in leaves),
        )
        calls = self._kinds.setdefault(kind, [])
        self._numbers += 1
        if len(calls) == 2:
            self._repeats[self._numbers] = place
            return self._repeat(calls[1], tensors)
        call = _Call(self._numbers, place)
        calls.append(call)
        entered = dcp.mark_enter(tensors, call.number)
        self._watch(place, entered)  # what is written into them would be lost
        leaves = [entered[order[id(leaf)]] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = _compat.unflatten(leaves, structure)
        self._open.append(place)
        result = forward(*args, **kwargs)
        self._open.pop()
        return self._leave(call, result, tensors, entered)

    def _leave(self, call: _Call, result: object, tensors: list[Tensor], entered: list[Tensor]):
        leaves, call.structure = _compat.flatten(result)
        made: list[Tensor] = []
        for leaf in leaves:
            same = [index for index, tensor in enumerate(entered) if tensor is leaf]
            if same:
                call.results.append(("input", same[0]))
            elif isinstance(leaf, Tensor):
                call.results.append(("output", len(made)))
                made.append(leaf)
            else:
                call.results.append(("value", leaf))
        values = [what for how, what in call.results if how == "value"]
        if not made or not all(value is None or isinstance(value, (bool, int, str)) for value in values):
            self.refused.add(call.place.path)
        call.outputs = dcp.mark_leave(made, call.number) if made else []
        for leaf, output in zip(made, call.outputs):
            for outside, tensor in zip(tensors, entered):
                if _compat.same_storage(leaf, tensor):  # a view of an input, but not to the tracer
                    self._watch(call.place, (outside, output))
        return self._returned(call, tensors, call.outputs)

    def _repeat(self, original: _Call, tensors: list[Tensor]):
        outputs = dcp.mark_repeat(tensors, original.outputs, self._numbers, original.number)
        return self._returned(original, tensors, outputs)

    def _returned(self, call: _Call, inputs: list[Tensor], outputs: list[Tensor]):
        sources = {"input": inputs, "output": outputs}
        leaves = [sources[how][what] if how in sources else what for how, what in call.results]
        return _compat.unflatten(leaves, call.structure)

    def expand(self, graph: fx.Graph, names: Mapping[fx.Node, Name]) -> bool:
        """Copy what was not traced and remove all marks; False: more has been refused, and the trace must be redone.

        Args:
            names: what each input of the graph is.
        """
        self.refused |= {place.path for place, tensor in self._watched if _compat.was_written(tensor)}
        if self._refuse_alike():
            return False
        copier = _Copier(graph, names, self.places.values())
        segments: dict[int, _Segment] = {}
        opened: list[_Segment] = []
        for node in list(graph.nodes):
            if node.target is REPEAT:
                _, _, number, original = node.args
                copies = copier.copy(segments[original], self._place(original), self._repeats[number], node)
                for segment in opened:
                    segment.nodes += copies
            if node.target is REPEAT or node in copier.replaced:
                continue
            if node.target is LEAVE:
                opened[-1].leave = node
                segments[node.args[1]] = opened.pop()
            for segment in opened:
                segment.nodes.append(node)
            if node.target is ENTER:
                opened.append(_Segment(node))
        for calls in self._kinds.values():
            prints = [copier.fingerprint(segments[call.number], call.place) for call in calls if call.number in segments]
            results = [(call.results, str(call.structure)) for call in calls]
            if len(calls) == 2 and (len(prints) < 2 or None in prints or prints[0] != prints[1] or results[0] != results[1]):
                self.refused |= {call.place.path for call in calls}
        self.refused |= copier.missing
        if self._refuse_alike():
            return False
        self.copied = copier.copied
        _remove_marks(graph)
        return True

    def _refuse_alike(self) -> bool:
        """Whether something was refused in this trace; if so, refuse all of its class, so that few traces are redone."""
        calls = [call.place for calls in self._kinds.values() for call in calls]
        found = {place.type for place in (*calls, *self._repeats.values()) if place.path in self.refused}
        self.refused |= {place.path for place in self.places.values() if place.type in found}
        return bool(found)

    def _place(self, number: int) -> Place:
        return next(call.place for calls in self._kinds.values() for call in calls if call.number == number)


class _Copier:
    """Copies segments from one layer to another.

    Attributes:
        copied: calls so far.
        missing: paths of modules that lack a weight or state of their original.
        replaced: results of repeats that copies have taken the place of.
    """

    def __init__(self, graph: fx.Graph, names: Mapping[fx.Node, Name], places):
        self.graph, self.names = graph, names
        self.placeholders = {name: node for node, name in names.items()}
        self.paths = tuple(place.path + "." for place in places)
        self.copied = 0
        self.missing: set[str] = set()
        self.replaced: set[fx.Node] = set()

    def copy(self, segment: _Segment, source: Place, target: Place, repeat: fx.Node) -> list[fx.Node]:
        """The calls of ``segment`` once more, in front of ``repeat``, whose results they then are."""
        inputs = repeat.args[0]
        copies = {node: inputs[index] for node, index in segment.inputs().items()}
        around = repeat.meta.get("nn_module_stack") or {}

        def moved(node: fx.Node) -> fx.Node:
            if node not in copies and node in self.names:
                copies[node] = self._counterpart(node, source, target)
            return copies.get(node, node)

        made = []
        with self.graph.inserting_before(repeat):
            for node in segment.nodes:
                if node in copies:
                    continue
                copies[node] = new = self.graph.node_copy(node, moved)
                if (index := _layer_argument(node)) is not None:
                    new.update_arg(index, target.layer)
                below = [path for path in node.meta.get("nn_module_stack") or {} if path.startswith(source.path + ".")]
                paths = [target.path + path.removeprefix(source.path) for path in below]
                new.meta["nn_module_stack"] = {**around, **{path: (path, None) for path in paths}}
                made.append(new)
        for user in list(repeat.users):
            user.replace_all_uses_with(moved(segment.leave.args[0][user.args[1]]))
            self.graph.erase_node(user)
            self.replaced.add(user)
        self.graph.erase_node(repeat)
        self.copied += 1
        return made

    def _counterpart(self, node: fx.Node, source: Place, target: Place) -> fx.Node:
        """What stands in the target's place for an input of the graph."""
        name = self.names[node]
        if isinstance(name, tuple):
            name = (target.layer, name[1])
        elif name.startswith(source.path + "."):
            name = target.path + name.removeprefix(source.path)
        if name not in self.placeholders:
            self.missing.add(target.path)
        return self.placeholders.get(name, node)

    def fingerprint(self, segment: _Segment, place: Place) -> list | None:
        """Equal for segments that are copies of each other; None if it reads what a copy could not.

        Sizes count by their value: where a size is read is up to the tracer, which reads most of them once per graph.
        """
        known: dict[fx.Node, object] = {node: ("input", index) for node, index in segment.inputs().items()}

        def reference(node: fx.Node) -> object:
            return known[node] if node in known else self._outside(node, place)

        prints = []
        for node in segment.nodes:
            if node in known or _is_size(node) or node.target in (ENTER, LEAVE):
                continue
            if (passed := _passed(node)) is not None:  # marks of a module within do not count
                known[node] = reference(passed)
                continue
            arguments = list(node.args)
            if (index := _layer_argument(node)) is not None:
                if arguments[index] != place.layer:
                    return None
                arguments[index] = None
            references = [reference(operand) for operand in node.all_input_nodes]
            if None in references:
                return None
            known[node] = ("call", len(prints))
            numbered = fx.map_arg((arguments, node.kwargs), lambda operand: _Named(reference(operand)))
            prints.append((str(node.target), str(numbered), _describe_all(node.meta["val"])))
        results = [reference(node) for node in segment.leave.args[0]]
        return None if None in results else [*prints, results]

    def _outside(self, node: fx.Node, place: Place) -> object:
        """How a segment may refer to something outside of it; None: not at all."""
        if _is_size(node):
            return "size", str(node.meta["val"])
        name = self.names.get(node)
        if isinstance(name, tuple):
            return ("state", name[1]) if name[0] == place.layer else None
        if name is None or (name.startswith(self.paths) and not name.startswith(place.path + ".")):
            return None  # made by another call, or of another layer
        return ("own", name.removeprefix(place.path)) if name.startswith(place.path + ".") else ("shared", name)


@dataclass(frozen=True)
class _Named:
    """Stands for an operand in a fingerprint."""

    name: object

    def __repr__(self) -> str:
        return str(self.name)


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], (int, torch.SymInt))


def _passed(node: fx.Node) -> fx.Node | None:
    """What a result of a mark is outside of it, or None if ``node`` is nothing of the kind."""
    if node.target is operator.getitem and node.args[0].target in (ENTER, LEAVE):
        return node.args[0].args[0][node.args[1]]
    return None


def _layer_argument(node: fx.Node) -> int | None:
    return LAYER_ARGUMENT.get(node.target)


def _describe_all(value: object) -> str:
    return str([describe(part) for part in (value if isinstance(value, (list, tuple)) else [value])])


def _remove_marks(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if (passed := _passed(node)) is not None:
            node.replace_all_uses_with(passed)
    graph.eliminate_dead_code()
