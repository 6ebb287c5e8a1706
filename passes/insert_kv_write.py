# SPDX-License-Identifier: Apache-2.0
"""Write every layer's new latents into its cache, before its attention reads them.

The slot of a row comes from ``cp_local_slot``: PAD on every rank but the one that owns the position.
"""

from __future__ import annotations

from dcp_compile.capture import StepGraph
from dcp_compile.errors import InvariantError

from .context import PassContext, PassResult
from .graph_tools import Emitter, aten, dcp, nodes_of


def run(graph: StepGraph, context: PassContext) -> PassResult:
    """One ``kv_write`` per site, in front of its attention."""
    written = {node.args[2] for node in nodes_of(graph.graph, dcp.kv_write.default)}
    matches = 0
    for site in graph.sites:
        if site.kv_cache in written:
            continue
        first = graph.attention[site.layer].calls[0]
        emit = Emitter(graph.graph, like=first)
        with graph.graph.inserting_before(first):
            slots = emit(
                dcp.cp_local_slot.default,
                site.positions,
                site.block_table,
                context.block_size,
                context.rank,
                context.dcp_size,
                context.interleave,
            )
            latent = emit(aten.reshape.default, site.latent_new, [-1, site.latent_dim])
            rope = emit(aten.reshape.default, site.rope_new, [-1, site.rope_dim])
            emit(dcp.kv_write.default, latent, rope, site.kv_cache, slots, context.kv_scale)
        matches += 1
    return PassResult("insert_kv_write", matches)


def check(graph: StepGraph, context: PassContext) -> None:
    """Each site's latents are written to its cache, before every read of it."""
    writes = nodes_of(graph.graph, dcp.kv_write.default)
    if len(writes) != len(graph.sites):
        raise InvariantError(f"insert_kv_write: {len(writes)} writes for {len(graph.sites)} sites")
    order = {node: index for index, node in enumerate(graph.graph.nodes)}
    sources = {site.kv_cache: (site.latent_new, site.rope_new) for site in graph.sites}
    for write in writes:
        if tuple(rows.args[0] for rows in write.args[:2]) != sources.get(write.args[2]):
            raise InvariantError(
                f"insert_kv_write: {write.name} does not store the latent of the layer whose cache it fills"
            )
        for user in write.args[2].users:
            if user is not write and order[user] < order[write]:
                raise InvariantError(f"insert_kv_write: {user.name} reads the cache before {write.name} fills it")
