# SPDX-License-Identifier: Apache-2.0
"""Spread each layer's attention over the ranks of the DCP group.

Every rank attends to the tokens it holds. When heads are sharded, the queries of all ranks are gathered first, unless
every rank makes all of them itself, and each rank merges the partials of its own heads; when heads are replicated, each
rank has all queries and merges all partials. How the ranks exchange them is up to the two operators of
:mod:`dcp_compile.ops.exchange`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from dcp_compile.capture import StepGraph
from dcp_compile.errors import InvariantError

from .attention import Attention, emit_attention
from .context import PassContext, PassResult
from .graph_tools import Emitter, aten, cone, dcp, erase_unused, nodes_of

c10d = torch.ops._c10d_functional

GATHER, MERGE = dcp.gather_heads.default, dcp.merge_ranks.default


def run(graph: StepGraph, context: PassContext) -> PassResult:
    """Rewrite the attention of every layer; with one rank there is nothing to do."""
    if context.dcp_size == 1:
        return PassResult("shard_dcp", 0)
    merged = {node.args[0] for node in nodes_of(graph.graph, MERGE)}
    waiting = [site for site in graph.sites if graph.attention[site.layer].out not in merged]
    for site in waiting:
        local = graph.attention[site.layer]
        emit = Emitter(graph.graph, like=local.out)
        with graph.graph.inserting_before(local.calls[0]):
            queries = local.q_latent, local.q_rope
            if _gathers(site, context):
                queries = _gather_heads(emit, site, context, local)
            attention = emit_attention(emit, site, context, *queries)
            out = emit(MERGE, attention.out, attention.lse, site.own_heads, context.dcp_size, context.group)
        local.own.replace_all_uses_with(out)
        erase_unused(graph.graph, {*local.calls, attention.own})
        graph.attention[site.layer] = replace(attention, q_latent=local.q_latent, q_rope=local.q_rope, own=out)
    return PassResult("shard_dcp", len(waiting))


def check(graph: StepGraph, context: PassContext) -> None:
    """Every collective of the model is waited for in the graph, and each layer meets the other ranks alike."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and is_collective(node):
            waits = [user for user in node.users if user.target is c10d.wait_tensor.default]
            if len(waits) != 1 or len(node.users) != 1:
                raise InvariantError(f"shard_dcp: {node.name} is waited for {len(waits)} times")
    if context.dcp_size == 1:
        return
    merges = nodes_of(graph.graph, MERGE)
    if len(merges) != len(graph.sites):
        raise InvariantError(f"shard_dcp: {len(merges)} merges for {len(graph.sites)} sites")
    for site, merge in zip(graph.sites, merges):
        wanted = [GATHER, MERGE] if _gathers(site, context) else [MERGE]
        local = graph.attention[site.layer]
        between, _ = cone([merge], [local.q_latent, local.q_rope])
        found = [node.target for node in nodes_of(graph.graph, GATHER, MERGE) if node in between]
        if found != wanted:
            names = [[target.name() for target in targets] for targets in (found, wanted)]
            raise InvariantError(f"shard_dcp: layer {site.layer} meets the other ranks in {names[0]} instead of {names[1]}")


def _gathers(site, context: PassContext) -> bool:
    """Whether ranks make the queries of their own heads only."""
    return context.heads_sharded and site.own is None


def is_collective(node: fx.Node) -> bool:
    """A collective that must be waited for."""
    target = node.target
    return getattr(target, "namespace", None) == "_c10d_functional" and target is not c10d.wait_tensor.default


def _gather_heads(emit: Emitter, site, context: PassContext, local: Attention) -> tuple[fx.Node, fx.Node]:
    """Queries of all ranks' heads, in rank order: ``[T, D * H, R]`` and ``[T, D * H, rope]``."""
    query = emit(aten.cat.default, [local.q_latent, local.q_rope], -1)  # [T, H, R + rope]
    query = emit(GATHER, query, context.dcp_size, context.group)
    latent = emit(aten.slice.Tensor, query, 2, 0, site.latent_dim)
    return latent, emit(aten.slice.Tensor, query, 2, site.latent_dim, site.latent_dim + site.rope_dim)
