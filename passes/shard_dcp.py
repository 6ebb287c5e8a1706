# SPDX-License-Identifier: Apache-2.0
"""Spread each layer's attention over the ranks of the DCP group.

Every rank attends to the tokens it holds. When heads are sharded, the queries of all ranks are gathered first and each
rank gets back the partials of its own heads (an exchange); when heads are replicated, each rank already has all queries
and gathers all partials. An output and its LSE travel as one message, and the merge runs in float32.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from dcp_compile.capture import StepGraph
from dcp_compile.errors import InvariantError

from .attention import Attention, emit_attention
from .context import PassContext, PassResult
from .graph_tools import Emitter, aten, cone, dcp, erase_unused, nodes_of, value

c10d = torch.ops._c10d_functional


def run(graph: StepGraph, context: PassContext) -> PassResult:
    """Rewrite the attention of every layer; with one rank there is nothing to do."""
    if context.dcp_size == 1:
        return PassResult("shard_dcp", 0)
    merged = {node.args[0] for node in nodes_of(graph.graph, dcp.merge_packed.default)}
    waiting = [site for site in graph.sites if not _reaches(graph.attention[site.layer], merged)]
    for site in waiting:
        local = graph.attention[site.layer]
        emit = Emitter(graph.graph, like=local.out)
        with graph.graph.inserting_before(local.calls[0]):
            queries = (
                _gather_heads(emit, site, context, local) if context.heads_sharded else (local.q_latent, local.q_rope)
            )
            attention = emit_attention(emit, site, context, *queries)
            exchange = _scatter_heads if context.heads_sharded else _gather_partials
            out = exchange(emit, site, context, attention)
        local.out.replace_all_uses_with(out)
        erase_unused(graph.graph, local.calls)
        graph.attention[site.layer] = replace(attention, q_latent=local.q_latent, q_rope=local.q_rope)
    return PassResult("shard_dcp", len(waiting))


def check(graph: StepGraph, context: PassContext) -> None:
    """Every collective is waited for in the graph, and each layer has the same collectives in the same order."""
    collectives = [node for node in graph.graph.nodes if node.op == "call_function" and is_collective(node)]
    for node in collectives:
        waits = [user for user in node.users if user.target is c10d.wait_tensor.default]
        if len(waits) != 1 or len(node.users) != 1:
            raise InvariantError(f"shard_dcp: {node.name} is waited for {len(waits)} times")
    if context.dcp_size > 1:
        merges = nodes_of(graph.graph, dcp.merge_packed.default)
        if len(merges) != len(graph.sites):
            raise InvariantError(f"shard_dcp: {len(merges)} merges for {len(graph.sites)} sites")
        _check_order(graph, collectives, merges)


def _check_order(graph: StepGraph, collectives: list[fx.Node], merges: list[fx.Node]) -> None:
    """From its own queries to its merge, each layer meets the other ranks in the same collectives.

    What the model itself exchanges between its attention layers is not looked at: it may use the same group.
    """
    first = None
    for site, merge in zip(graph.sites, merges):
        local = graph.attention[site.layer]
        between, _ = cone([merge], [local.q_latent, local.q_rope])
        calls = [node.target.name() for node in collectives if node in between]
        first = first or (site.layer, calls)
        if calls != first[1]:
            raise InvariantError(
                f"shard_dcp: the collectives of layer {site.layer} ({calls}) differ from those of layer {first[0]} "
                f"({first[1]})"
            )


def is_collective(node: fx.Node) -> bool:
    """A collective that must be waited for."""
    target = node.target
    return getattr(target, "namespace", None) == "_c10d_functional" and target is not c10d.wait_tensor.default


def _reaches(attention: Attention, merged: set[fx.Node]) -> bool:
    """Whether the partials of ``attention`` already go to a cross-rank merge."""
    pending, seen = [attention.out], set()
    while pending:
        node = pending.pop()
        if node in merged:
            return True
        for user in node.users:
            if user not in seen and (is_collective(user) or user.target in _TRANSPORT):
                seen.add(user)
                pending.append(user)
    return False


_TRANSPORT = {
    dcp.pack_partials.default, c10d.wait_tensor.default, aten.view.default, aten.permute.default,
    aten.clone.default, aten.reshape.default,
}  # fmt: skip


def _gather_heads(emit: Emitter, site, context: PassContext, local: Attention) -> tuple[fx.Node, fx.Node]:
    """Queries of all ranks' heads, in rank order: ``[T, D * H, R]`` and ``[T, D * H, rope]``."""
    width = site.latent_dim + site.rope_dim
    query = emit(aten.cat.default, [local.q_latent, local.q_rope], -1)  # [T, H, R + rope]
    query = emit(
        aten.clone.default, emit(aten.permute.default, query, [1, 0, 2]), memory_format=torch.contiguous_format
    )
    query = emit(c10d.all_gather_into_tensor.default, query, context.dcp_size, context.group)
    query = emit(aten.permute.default, emit(c10d.wait_tensor.default, query), [1, 0, 2])  # [T, D * H, R + rope]
    latent = emit(aten.slice.Tensor, query, 2, 0, site.latent_dim)
    return latent, emit(aten.slice.Tensor, query, 2, site.latent_dim, width)


def _gather_partials(emit: Emitter, site, context: PassContext, attention: Attention) -> fx.Node:
    """Replicated heads: every rank receives every partial and merges all heads."""
    packed = emit(dcp.pack_partials.default, attention.out, attention.lse)  # [T, H, R + lanes]
    heads, width = value(packed).shape[1:]
    gathered = emit(c10d.all_gather_into_tensor.default, packed, context.dcp_size, context.group)
    gathered = emit(c10d.wait_tensor.default, gathered)
    parts = emit(aten.view.default, gathered, [context.dcp_size, -1, heads, width])
    return emit(dcp.merge_packed.default, parts, site.latent_dim)


def _scatter_heads(emit: Emitter, site, context: PassContext, attention: Attention) -> fx.Node:
    """Sharded heads: rank r receives every rank's partials of its own heads and merges them."""
    packed = emit(dcp.pack_partials.default, attention.out, attention.lse)  # [T, D * H, R + lanes]
    width = value(packed).shape[2]
    parts = emit(aten.view.default, packed, [-1, context.dcp_size, site.heads, width])
    parts = emit(
        aten.clone.default, emit(aten.permute.default, parts, [1, 0, 2, 3]), memory_format=torch.contiguous_format
    )
    rows = emit(aten.sym_size.int, attention.q_latent, 0)
    parts = emit(aten.view.default, parts, [-1, site.heads, width])
    sizes = [rows] * context.dcp_size
    received = emit(c10d.all_to_all_single.default, parts, sizes, sizes, context.group)
    received = emit(c10d.wait_tensor.default, received)
    received = emit(aten.view.default, received, [context.dcp_size, -1, site.heads, width])
    return emit(dcp.merge_packed.default, received, site.latent_dim)
