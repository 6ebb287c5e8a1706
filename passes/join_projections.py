# SPDX-License-Identifier: Apache-2.0
"""Make sibling projections one product: queries, keys, values and gates of one input, gate and up of an MLP.

In a step of few rows every product is a launch, and what such a step waits for is launches. Products of one input with
weights ``[n_i, K]`` of their own become one with the weights joined, ``[sum of n_i, K]``, and its result is sliced. Where
the model puts the results side by side, a slice of the whole takes the place of that copy. The joined weight is
described here and made when the graph is lowered: no pass touches the model.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor, fx, nn

from dcp_compile import _compat
from dcp_compile.capture import Joined, StepGraph
from dcp_compile.errors import InvariantError

from .context import PassContext, PassResult
from .graph_tools import Emitter, aten, nodes_of, value

_VIEWS = (aten.view.default, aten._unsafe_view.default)
_SAME_ORDER = frozenset({*_VIEWS, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default})
_STRIDED = frozenset({"aten", "dcp"})  # operators of these take operands of any strides


@dataclass(frozen=True, eq=False)
class _Product:
    """``node`` is ``x @ t(weight)``, the only use of ``parameter``."""

    node: fx.Node
    weight: fx.Node
    parameter: nn.Parameter

    @property
    def rows(self) -> int:
        return self.parameter.shape[0]


@dataclass(frozen=True)
class _Plan:
    """One product in place of several.

    Attributes:
        products: in the order of their rows. spans: the columns of the whole that each of them is.
        copies: concatenations that are columns of the whole, too.
        weight, whole: fake values of the joined weight and of the product.
        values: fake values by node: of the slices for products and copies, and of all that is no longer what it was,
            since slices have other strides.
    """

    products: list[_Product]
    spans: list[tuple[int, int]]
    copies: dict[fx.Node, tuple[int, int]]
    weight: Tensor
    whole: Tensor
    values: dict[fx.Node, object]


class _NeedsItsOwn(Exception):
    """Something takes the result of a product in its own layout only."""


def run(graph: StepGraph, context: PassContext) -> PassResult:
    """Join until nothing is left to join: results that were joined may be the one input of others."""
    matches, found = 0, True
    while found:
        found = False
        order = {node: index for index, node in enumerate(graph.graph.nodes)}
        holders = _holders(graph)
        for products in _siblings(graph):
            plan = _plan(products, order, holders)
            if plan is not None:
                _join(graph, plan, min((product.node for product in plan.products), key=order.__getitem__))
                matches += len(plan.products) - 1
                found = True
    inputs = graph.graph.find_nodes(op="placeholder")
    graph.constants = {node: graph.constants[node] for node in inputs if node in graph.constants}
    return PassResult("join_projections", matches)


def check(graph: StepGraph, context: PassContext) -> None:
    """No two products are left that could be one, and what is joined fits together."""
    order = {node: index for index, node in enumerate(graph.graph.nodes)}
    holders = _holders(graph)
    left = [plan for products in _siblings(graph) if (plan := _plan(products, order, holders)) is not None]
    if left:
        names = [[product.node.name for product in plan.products] for plan in left]
        raise InvariantError(f"join_projections: products of one input left: {names}")
    for node, constant in graph.constants.items():
        if isinstance(constant, Joined):
            wanted = sum(len(part) for part in constant.parts), constant.parts[0].shape[1]
            if (found := tuple(value(node).shape)) != wanted:
                raise InvariantError(f"join_projections: {node.name} is {found}, its parts are {wanted}")


# --- what can be joined ----------------------------------------------------------------------------------------------


def _siblings(graph: StepGraph) -> list[list[_Product]]:
    """Products that have their input in common."""
    groups: dict[tuple, list[_Product]] = defaultdict(list)
    for node in nodes_of(graph.graph, aten.mm.default):
        product = _product(graph, node)
        if product is not None:
            groups[_place(node.args[0])].append(product)
    return [_ordered(products) for products in groups.values() if len(products) > 1]


def _product(graph: StepGraph, node: fx.Node) -> _Product | None:
    transposed = node.args[1]
    if transposed.target is not aten.t.default or len(transposed.users) != 1:
        return None
    weight = transposed.args[0]
    parameter = graph.constants.get(weight)
    # By its exact type: a subclass may hold something else than a matrix of numbers.
    if type(parameter) is not nn.Parameter or len(weight.users) != 1 or not parameter.is_contiguous():
        return None
    if parameter.is_inference() or parameter.numel() == 0 or _has_bias(graph, node):
        return None
    if parameter.device.type == "cpu" and parameter.is_shared():  # with other processes
        return None
    return _Product(node, weight, parameter)


def _has_bias(graph: StepGraph, node: fx.Node) -> bool:
    """Whether a vector of the model is added to the result."""
    users = list(node.users)
    while len(users) == 1 and users[0].target in _VIEWS:
        users = list(users[0].users)
    added = [operand for user in users if user.target is aten.add.Tensor for operand in user.all_input_nodes]
    return any(operand in graph.constants and value(operand).dim() == 1 for operand in added)


def _place(node: fx.Node) -> tuple:
    """Equal for the same numbers in the same order and shape."""
    shape = str(value(node).shape)
    while node.target in _SAME_ORDER or _is_whole(node):
        node = node.args[0]
    if getattr(node.target, "namespace", None) == "aten" and _compat.is_view(node.target):
        return node.target, _place(node.args[0]), str((node.args[1:], node.kwargs)), shape
    return node, shape


def _is_whole(node: fx.Node) -> bool:
    """A slice that leaves nothing out, as ``x[:, None]`` has one."""
    return node.target is aten.slice.Tensor and str(value(node).shape) == str(value(node.args[0]).shape)


def _layout(fake: object) -> tuple:
    if not isinstance(fake, Tensor):
        return (str(fake),)
    return fake.dtype, str(fake.shape), str(fake.stride()), str(fake.storage_offset())


def _holders(graph: StepGraph) -> Counter[int]:
    """How many constants lie on each storage."""
    return Counter(_storage(constant) for constant in graph.constants.values() if isinstance(constant, Tensor))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _movable(products: list[_Product], holders: Counter[int]) -> list[_Product]:
    """Those whose weights have a storage of their own: of another, a tied weight or a whole would be left behind."""
    return [
        product
        for product in products
        if holders[_storage(product.parameter)] == 1
        and product.parameter.untyped_storage().nbytes() == product.parameter.nbytes
    ]


def _copies(products: list[_Product]) -> list[tuple[fx.Node, list[_Product]]]:
    """Concatenations of whole results, side by side."""
    results: dict[fx.Node, _Product] = {}
    for product in products:
        results[product.node] = product
        for user in product.node.users:
            if user.target in _VIEWS and value(user).shape[-1] == product.rows:
                results[user] = product
    found = []
    for node in dict.fromkeys(user for result in results for user in result.users):
        if node.target is aten.cat.default and all(operand in results for operand in node.args[0]):
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
            own = [results[operand] for operand in node.args[0]]
            if dim in (-1, value(node).dim() - 1) and len(set(own)) == len(own):
                found.append((node, own))
    return found


def _ordered(products: list[_Product]) -> list[_Product]:
    """As they come, except that what the model puts side by side lies side by side."""
    ordered: dict[_Product, None] = {}
    for _, own in _copies(products):
        if not ordered.keys() & set(own):
            ordered |= dict.fromkeys(own)
    return list(ordered | dict.fromkeys(products))


# --- what joining does to the rest -----------------------------------------------------------------------------------


def _plan(products: list[_Product], order: dict[fx.Node, int], holders: Counter[int]) -> _Plan | None:
    """How to join ``products``, or those of them that can be moved and whose results may be slices; None: under two."""
    products = _movable(products, holders)
    if len(products) < 2:
        return None
    try:
        return _planned(products, order)
    except _NeedsItsOwn:
        rest = [product for product in products if _may_be_slice(product, products, order)]
        return _plan(rest, order, holders) if len(rest) < len(products) else None


def _may_be_slice(product: _Product, products: list[_Product], order: dict[fx.Node, int]) -> bool:
    columns = sum(other.rows for other in products)
    fake = value(product.node)
    with _sizes_kept(fake):
        part = fake.new_empty(fake.shape[0], columns)[:, : product.rows]
    try:
        _renew({product.node: part}, order)
    except _NeedsItsOwn:
        return False
    return True


def _planned(products: list[_Product], order: dict[fx.Node, int]) -> _Plan:
    x = value(products[0].node.args[0])
    spans = list(pairwise([0, *accumulate(product.rows for product in products)]))
    copies = {}
    for node, own in _copies(products):
        first = products.index(own[0])
        if products[first : first + len(own)] == own:
            copies[node] = spans[first][0], spans[first + len(own) - 1][1]
    with _sizes_kept(x):
        weight = value(products[0].weight).new_empty(spans[-1][1], x.shape[1])
        whole = aten.mm.default(x, aten.t.default(weight))
        parts = {product.node: whole[:, start:end] for product, (start, end) in zip(products, spans)}
        parts |= {node: whole[:, start:end].view(value(node).shape) for node, (start, end) in copies.items()}
    return _Plan(products, spans, copies, weight, whole, _renew(parts, order))


def _renew(parts: dict[fx.Node, Tensor], order: dict[fx.Node, int]) -> dict[fx.Node, object]:
    """Fake values of ``parts`` and of what follows from them, up to where values are what they were.

    Raises:
        _NeedsItsOwn: a view of a slice that there is none of, an operator that may not take one, or a graph output.
    """
    values: dict[fx.Node, object] = dict(parts)
    waiting = [(order[user], user) for part in parts for user in part.users if user not in parts]
    heapq.heapify(waiting)
    with _sizes_kept(next(iter(parts.values()))):
        while waiting:
            _, node = heapq.heappop(waiting)
            if node in values:
                continue
            operands = [values[operand] for operand in node.all_input_nodes if operand in values]
            fake = _evaluated(node, operands, values)
            if _same(fake, value(node)) and not _shares(fake, operands):
                continue
            values[node] = fake
            for user in node.users:
                if user not in values:
                    heapq.heappush(waiting, (order[user], user))
    return values


@contextmanager
def _sizes_kept(fake: Tensor) -> Iterator[None]:
    """The fake mode of ``fake``; nothing that is computed in it narrows the sizes that the graph holds for."""
    with fake.fake_mode, fake.fake_mode.shape_env.suppress_guards():
        yield


def _evaluated(node: fx.Node, operands: list, values: dict[fx.Node, object]) -> object:
    namespace = getattr(node.target, "namespace", "aten")  # taking a result out of a list has none
    strided = any(not tensor.is_contiguous() for tensor in _tensors(operands))
    if node.op == "output" or (strided and namespace not in _STRIDED):
        raise _NeedsItsOwn
    arguments, keywords = fx.map_arg((node.args, node.kwargs), lambda n: values[n] if n in values else value(n))
    try:
        return node.target(*arguments, **keywords)
    except (RuntimeError, ValueError) as error:  # a view that is none
        raise _NeedsItsOwn from error


def _tensors(values: object) -> list[Tensor]:
    leaves, _ = _compat.flatten(values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _shares(fake: object, operands: list) -> bool:
    """Whether a value is a view of an operand."""
    return any(_compat.same_storage(one, other) for one in _tensors(fake) for other in _tensors(operands))


def _same(fake: object, wanted: object) -> bool:
    (mine, structure), (theirs, other) = _compat.flatten(fake), _compat.flatten(wanted)
    return structure == other and list(map(_layout, mine)) == list(map(_layout, theirs))


# --- joining ---------------------------------------------------------------------------------------------------------


def _join(graph: StepGraph, plan: _Plan, first: fx.Node) -> None:
    """Rewrite; ``first`` is the first of the products in the graph."""
    nodes, products = graph.graph, plan.products
    with nodes.inserting_after(products[0].weight):
        weight = nodes.placeholder(f"{products[0].weight.name}_joined")
    weight.meta["val"] = plan.weight
    emit = Emitter(nodes, like=first)
    with nodes.inserting_before(first):
        whole = emit(aten.mm.default, first.args[0], emit(aten.t.default, weight))
        whole.meta["val"] = plan.whole  # the one that the values of slices are views of
        parts = [nodes.call_function(aten.slice.Tensor, (whole, 1, *span)) for span in plan.spans]
    for node, fake in plan.values.items():
        node.meta["val"] = fake
    for node, (start, end) in plan.copies.items():
        with nodes.inserting_before(node):
            part = whole if (start, end) == (0, plan.spans[-1][1]) else emit(aten.slice.Tensor, whole, 1, start, end)
            operand = node.args[0][0]
            if operand.target in _VIEWS:
                part = emit(aten.view.default, part, [*operand.args[1][:-1], end - start])
        node.replace_all_uses_with(part)
        nodes.erase_node(node)
    for product, part in zip(products, parts):
        transposed = product.node.args[1]
        part.meta |= product.node.meta
        product.node.replace_all_uses_with(part)
        for node in (product.node, transposed, product.weight):
            nodes.erase_node(node)
        del graph.constants[product.weight]
    graph.constants[weight] = Joined(tuple(product.parameter for product in products))
