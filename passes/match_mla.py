# SPDX-License-Identifier: Apache-2.0
"""Find the MLA attention of every layer and prove that it can be absorbed.

From each attention marker the values are followed upwards, through layout operators only, to the one matrix product
that makes them: its weight is the KV up-projection, its input the latent. In the keys, followed likewise, the operand
that is broadcast over the heads is the rope key. All sizes come from shapes. The certificate then decides whether the
layout operators put everything where absorption assumes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from dcp_compile.capture import StepGraph
from dcp_compile.errors import InvariantError, MatchError, UnsupportedModelError
from dcp_compile.ops.markers import layer_of

from .certificate import certify
from .context import PassContext, PassResult
from .graph_tools import aten, cone, dcp, is_size, location, nodes_of, value

# Operators that only move elements. Copies into fresh buffers (new_empty, slice_scatter) count: the certificate sees
# whether they put things where absorption assumes.
LAYOUT = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.permute.default, aten.transpose.int,
    aten.t.default, aten.expand.default, aten.clone.default, aten.contiguous.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.select.int, aten.split_with_sizes.default,
    aten.split.Tensor, aten.unbind.int, aten.cat.default, aten.alias.default, aten.detach.default, aten.copy.default,
    aten.slice_scatter.default, aten.empty.memory_format, aten.new_empty.default, aten.full.default,
    aten.new_zeros.default, operator.getitem,
}  # fmt: skip
# Matrix products: which argument is the input and which the weight.
PRODUCTS = {
    aten.mm.default: (0, 1), aten.bmm.default: (0, 1), aten.matmul.default: (0, 1), aten.linear.default: (0, 1),
    aten.addmm.default: (1, 2),
}  # fmt: skip
# Operators whose result holds exactly the elements of their operand. Which of them lie between a latent and its
# up-projection does not matter here: the certificate runs them.
_REORDERS = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.clone.default, aten.alias.default,
    aten.detach.default, aten.contiguous.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
    aten.t.default, aten.transpose.int, aten.permute.default,
}  # fmt: skip


@dataclass(frozen=True)
class MLASite:
    """One certified attention call and the nodes around it.

    Attributes:
        layer: cache index. where: module path, for messages.
        attention, marker: the two marker calls. query: ``[T, H, 1, nope + rope]``. key, value: expanded.
        latent, rope: as attention reads them (after the cache); latent_new, rope_new: of this step's tokens.
        weight: the up-projection parameter ``[H * (nope + value), latent]``.
        kv_cache, block_table, positions, prefix_lengths: graph inputs the marker carried.
        own: the model's choice of this rank's heads among those it attends with; None if it goes on with all of them.
    """

    layer: int
    where: str
    attention: fx.Node
    marker: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    latent: fx.Node
    rope: fx.Node
    latent_new: fx.Node
    rope_new: fx.Node
    weight: fx.Node
    kv_cache: fx.Node
    block_table: fx.Node
    positions: fx.Node
    prefix_lengths: fx.Node
    heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    latent_dim: int
    scale: float
    own: fx.Node | None

    @property
    def own_heads(self) -> int:
        """Heads that the model goes on with."""
        return self.heads if self.own is None else self.heads // self.own.args[2]


def run(graph: StepGraph, context: PassContext) -> PassResult:
    """Fill ``graph.sites``; nothing is changed in the graph."""
    if graph.sites:
        return PassResult("match_mla", 0)
    markers = {layer_of(node): node for node in nodes_of(graph.graph, dcp.mark_latent.default)}
    sites = []
    for attention in nodes_of(graph.graph, dcp.mark_attention.default):
        site = _candidate(attention, markers.get(layer_of(attention)), graph.model)
        _check_cached(site)
        certify(site, graph.module)
        sites.append(site)
    graph.sites = sites
    return PassResult("match_mla", len(sites))


def check(graph: StepGraph, context: PassContext) -> None:
    """One site per attention marker, layers distinct."""
    layers = [site.layer for site in graph.sites]
    wanted = [layer_of(node) for node in nodes_of(graph.graph, dcp.mark_attention.default)]
    if (wanted and layers != wanted) or len(set(layers)) != len(layers):
        raise InvariantError(f"match_mla: sites for layers {layers}, attention calls in layers {wanted}")


def _candidate(attention: fx.Node, marker: fx.Node | None, model: str) -> MLASite:
    query, key, val, layer, scale = attention.args
    where = location(attention)
    if marker is None:
        raise MatchError(f"{where}: attention runs without a cache update in layer {layer}")
    product = _up_projection(val, where)
    input_at, weight_at = PRODUCTS[product.target]
    weight = _parameter(product.args[weight_at], where)
    latent = _before_reorders(product.args[input_at])
    heads, query_dim = value(query).shape[1], value(query).shape[3]
    value_dim = value(val).shape[3]
    rows, latent_dim = value(weight).shape[-2:]
    nope_dim, rest = divmod(rows, heads)
    nope_dim -= value_dim
    rope_dim = query_dim - nope_dim
    if rest or nope_dim <= 0 or rope_dim <= 0 or value(latent).shape[-1] != latent_dim:
        raise UnsupportedModelError(
            f"{model}: {where} is not multi-head latent attention (MLA), which is all that can be optimised: the weight "
            f"above the value has shape {tuple(value(weight).shape)} instead of [{heads} heads x (nope + {value_dim}), "
            f"{value(latent).shape[-1]}] with a nope size between 0 and the query's {query_dim}"
        )
    rope = _rope_key(key, rope_dim, where)
    if rope is None:
        raise UnsupportedModelError(
            f"{model}: {where} is not multi-head latent attention (MLA), which is all that can be optimised: no part of "
            f"the key of size {rope_dim} is shared by all heads"
        )
    return MLASite(
        layer=layer, where=where, attention=attention, marker=marker, query=query, key=key, value=val,
        latent=latent, rope=rope, latent_new=_this_step(latent, marker), rope_new=_this_step(rope, marker),
        weight=weight, kv_cache=marker.args[2], block_table=marker.args[3], positions=marker.args[4],
        prefix_lengths=marker.args[5], heads=heads, nope_dim=nope_dim, rope_dim=rope_dim, value_dim=value_dim,
        latent_dim=latent_dim, scale=scale,
        own=next((user for user in attention.users if user.target is dcp.own_heads.default), None),
    )  # fmt: skip


def _ends(start: fx.Node, where: str, what: str, is_end: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """The nodes above ``start`` that satisfy ``is_end``, reached through layout operators and the cache marker.

    Raises:
        MatchError: another operator is in the way; probes would not show every function it might be.
    """
    pending, seen, ends = [start], set(), []
    while pending:
        node = pending.pop()
        if node in seen or is_size(node) or node.op != "call_function":
            continue
        seen.add(node)
        if is_end(node):
            ends.append(node)
        elif node.target is operator.getitem and node.args[0].target is dcp.mark_latent.default:
            pending.append(node.args[0].args[node.args[1]])
        elif node.target in LAYOUT:
            pending += node.all_input_nodes
        else:
            raise MatchError(
                f"{where}: the {what} passes through {node.target} ({node.name}) after the KV up-projection; only "
                "layout operators can be absorbed, so this layer cannot be optimised"
            )
    return ends


def _up_projection(val: fx.Node, where: str) -> fx.Node:
    """The single matrix product above the values."""
    products = _ends(val, where, "value", lambda node: node.target in PRODUCTS)
    if len(products) != 1:
        raise MatchError(
            f"{where}: expected one matrix product above the value, the KV up-projection, but found {len(products)}; "
            "this layer cannot be optimised"
        )
    return products[0]


def _parameter(node: fx.Node, where: str) -> fx.Node:
    """The graph input behind a weight operand, looking through transposes."""
    while node.op == "call_function" and node.target in _REORDERS:
        node = node.args[0]
    if node.op != "placeholder":
        raise MatchError(
            f"{where}: the KV up-projection weight is computed in the graph by {node.target} (a quantised kv_b_proj, or a "
            "forward() that casts); load kv_b_proj unquantised, and take accelerate's wrapper off: "
            "accelerator.unwrap_model(model, keep_fp32_wrapper=False)"
        )
    return node


def _before_reorders(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and node.target in _REORDERS:
        node = node.args[0]
    return node


def _rope_key(key: fx.Node, rope_dim: int, where: str) -> fx.Node | None:
    """The ``[.., 1, S, rope]`` operand that is broadcast over the heads of the key, if there is one."""

    def is_broadcast(node: fx.Node) -> bool:
        shape = value(node.args[0]).shape if node.target is aten.expand.default else ()
        return len(shape) == 4 and shape[1] == 1 and shape[3] == rope_dim

    ends = _ends(key, where, "key", lambda node: node.target in PRODUCTS or is_broadcast(node))
    broadcasts = [node for node in ends if node.target is aten.expand.default]
    return _before_reorders(broadcasts[0].args[0]) if broadcasts else None


def _this_step(node: fx.Node, marker: fx.Node) -> fx.Node:
    """The operand the model passed to its cache, where ``node`` came back from it."""
    if node.target is operator.getitem and node.args[0] is marker:
        return marker.args[node.args[1]]
    return node


def _check_cached(site: MLASite) -> None:
    """MatchError unless attention reads the cache, and the cache holds latents or what is expanded from them."""
    parts = (("latent", site.latent, site.latent_new), ("rope key", site.rope, site.rope_new))
    for what, part, new in parts:
        if new is part and _depends(part, site.marker):
            raise MatchError(
                f"{site.where}: the {what} that attention uses is computed from the cached one by {part.target} "
                f"({part.name}); only what is in the cache itself can be attended to, so this layer cannot be optimised"
            )
    from_cache = [new is not part for _, part, new in parts]
    expanded = all(site.marker in cone([x], [site.latent, site.rope])[0] for x in (site.key, site.value))
    if not all(from_cache) and not (expanded and not any(from_cache)):
        raise MatchError(
            f"{site.where}: attention does not read what the cache returned; keys and values must come from "
            "cache.update"
        )


def _depends(node: fx.Node, marker: fx.Node) -> bool:
    """Whether ``node`` is computed from the results of ``marker``; nodes before it need not be looked at."""
    pending, seen = [node], set()
    while pending:
        node = pending.pop()
        if node is marker:
            return True
        if node not in seen and marker < node and not is_size(node):
            seen.add(node)
            pending += node.all_input_nodes
    return False
