# SPDX-License-Identifier: Apache-2.0
"""Find the MLA attention of every layer and prove that it can be absorbed.

From each attention marker the values are followed upwards, through layout operators only, to the one matrix product
that makes them: its weight is the KV up-projection, its input the latent. In the keys, the operand that is broadcast
over the heads is the rope key. All sizes come from shapes. The certificate then decides.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from dcp_compile.capture import StepGraph
from dcp_compile.errors import InvariantError, MatchError
from dcp_compile.ops.markers import layer_of

from .certificate import certify
from .context import PassContext, PassResult
from .graph_tools import aten, cone, dcp, location, nodes_of, value

# Operators that only move elements. Copies into fresh buffers (new_empty, slice_scatter) count: the certificate sees
# whether they put things where absorption assumes.
LAYOUT = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.permute.default, aten.transpose.int,
    aten.t.default, aten.expand.default, aten.clone.default, aten.contiguous.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.slice.Tensor, aten.select.int, aten.split_with_sizes.default, aten.split.Tensor,
    aten.unbind.int, aten.cat.default, aten.alias.default, aten.detach.default, aten.copy.default,
    aten.slice_scatter.default, aten.empty.memory_format, aten.new_empty.default, aten.full.default,
    aten.new_zeros.default, operator.getitem,
}  # fmt: skip
# Matrix products: which argument is the input and which the weight.
PRODUCTS = {
    aten.mm.default: (0, 1), aten.bmm.default: (0, 1), aten.matmul.default: (0, 1), aten.linear.default: (0, 1),
    aten.addmm.default: (1, 2),
}  # fmt: skip
_RESHAPES = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.clone.default, aten.alias.default,
    aten.detach.default, aten.contiguous.default,
}  # fmt: skip
_TRANSPOSES = {aten.t.default, aten.transpose.int, aten.permute.default}


@dataclass(frozen=True)
class MLASite:
    """One certified attention call and the nodes around it.

    Attributes:
        layer: cache index. where: module path, for messages.
        attention, marker: the two marker calls. query: ``[T, H, 1, nope + rope]``. key, value: expanded.
        latent, rope: as attention reads them (after the cache); latent_new, rope_new: of this step's tokens.
        weight: the up-projection parameter ``[H * (nope + value), latent]``.
        kv_cache, block_table, positions, prefix_lengths: graph inputs the marker carried.
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


def run(graph: StepGraph, context: PassContext) -> PassResult:
    """Fill ``graph.sites``; nothing is changed in the graph."""
    if graph.sites:
        return PassResult("match_mla", 0)
    markers = {layer_of(node): node for node in nodes_of(graph.graph, dcp.mark_latent.default)}
    sites = []
    for attention in nodes_of(graph.graph, dcp.mark_attention.default):
        site = _candidate(attention, markers.get(layer_of(attention)))
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


def _candidate(attention: fx.Node, marker: fx.Node | None) -> MLASite:
    query, key, val, layer, scale = attention.args
    where = location(attention)
    if marker is None:
        raise MatchError(f"{where}: attention runs without a cache update in layer {layer}")
    product = _up_projection(val, where)
    input_at, weight_at = PRODUCTS[product.target]
    weight = _parameter(product.args[weight_at], where)
    latent = _before_reshapes(product.args[input_at])
    heads, query_dim = value(query).shape[1], value(query).shape[3]
    value_dim = value(val).shape[3]
    rows, latent_dim = value(weight).shape[-2:]
    nope_dim, rest = divmod(rows, heads)
    nope_dim -= value_dim
    rope_dim = query_dim - nope_dim
    if rest or nope_dim <= 0 or rope_dim <= 0 or value(latent).shape[-1] != latent_dim:
        raise MatchError(
            f"{where}: the up-projection weight has shape {tuple(value(weight).shape)}, which is not "
            f"[{heads} heads x (nope + {value_dim}), {value(latent).shape[-1]}] with a positive nope size below the query's "
            f"{query_dim}; this is not multi-head latent attention"
        )
    rope = _rope_key(key, latent, rope_dim, where)
    return MLASite(
        layer=layer, where=where, attention=attention, marker=marker, query=query, key=key, value=val,
        latent=latent, rope=rope, latent_new=_this_step(latent, marker), rope_new=_this_step(rope, marker),
        weight=weight, kv_cache=marker.args[2], block_table=marker.args[3], positions=marker.args[4],
        prefix_lengths=marker.args[5], heads=heads, nope_dim=nope_dim, rope_dim=rope_dim, value_dim=value_dim,
        latent_dim=latent_dim, scale=scale,
    )  # fmt: skip


def _up_projection(val: fx.Node, where: str) -> fx.Node:
    """The single matrix product above the values, reached through layout operators and the cache marker."""
    pending, seen, products = [val], set(), []
    while pending:
        node = pending.pop()
        if node in seen or not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
            continue
        seen.add(node)
        if node.target in PRODUCTS:
            products.append(node)
        elif node.target is operator.getitem and node.args[0].target is dcp.mark_latent.default:
            pending.append(node.args[0].args[node.args[1]])
        elif node.target in LAYOUT:
            pending += node.all_input_nodes
        else:
            raise MatchError(
                f"{where}: the value passes through {node.target} ({node.name}) after the KV up-projection; only layout "
                "operators can be absorbed, so this layer cannot be optimised"
            )
    if len(products) != 1:
        raise MatchError(f"{where}: expected one up-projection above the value, found {len(products)}; not MLA")
    return products[0]


def _parameter(node: fx.Node, where: str) -> fx.Node:
    """The graph input behind a weight operand, looking through transposes."""
    while node.op == "call_function" and node.target in _TRANSPOSES | _RESHAPES:
        node = node.args[0]
    if node.op != "placeholder":
        raise MatchError(
            f"{where}: the KV up-projection weight is computed in the graph by {node.target} (a quantised kv_b_proj?); "
            "load kv_b_proj unquantised"
        )
    return node


def _before_reshapes(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and node.target in _RESHAPES:
        node = node.args[0]
    return node


def _rope_key(key: fx.Node, latent: fx.Node, rope_dim: int, where: str) -> fx.Node:
    """The ``[.., 1, S, rope]`` operand that is broadcast over the heads of the key."""
    interior, _ = cone([key], [latent])
    for node in sorted(interior, reverse=True):  # the broadcast nearest to the attention is this layer's
        if node.target is aten.expand.default:
            source = node.args[0]
            shape = value(source).shape
            if len(shape) == 4 and shape[1] == 1 and shape[3] == rope_dim:
                return _before_reshapes(source)
    raise MatchError(
        f"{where}: no rope key of size {rope_dim} shared by all heads was found in the key; this is not multi-head latent "
        "attention"
    )


def _this_step(node: fx.Node, marker: fx.Node) -> fx.Node:
    """The operand the model passed to its cache, where ``node`` came back from it."""
    if node.target is operator.getitem and node.args[0] is marker:
        return marker.args[node.args[1]]
    return node
