# SPDX-License-Identifier: Apache-2.0
"""Replace each certified attention by its absorbed form over the paged latent cache.

Instead of expanding every cached latent to keys and values, the query is taken to the latent space and the output back:
``q_latent = q_nope W_uk``, attention over ``[latent | rope]``, ``out W_uv``. W_uk and W_uv are views of the up-projection
parameter, so no weight is copied. Metadata operators are emitted naively here, per layer; the hoist pass shares them.
"""

from __future__ import annotations

import torch
from torch import fx

from dcp_compile.capture import StepGraph
from dcp_compile.errors import InvariantError

from .attention import Attention, emit_attention
from .context import PassContext, PassResult
from .graph_tools import MARKERS, Emitter, aten, cone, dcp, erase_unused, nodes_of, value
from .match_mla import MLASite


def run(graph: StepGraph, context: PassContext) -> PassResult:
    """Rewrite every site; ``graph.attention`` then holds the emitted attention calls by layer."""
    waiting = [site for site in graph.sites if site.layer not in graph.attention]
    for site in waiting:
        _describe_pool(site, context)
        graph.attention[site.layer] = _absorb(graph, site, context)
    recurrent = {dcp.mark_conv.default, dcp.mark_recurrence.default}
    left = [node.name for node in nodes_of(graph.graph, *(MARKERS - recurrent))]
    if left:
        raise InvariantError(f"absorb_mla: marker operators left: {left}")
    return PassResult("absorb_mla", len(waiting))


def check(graph: StepGraph, context: PassContext) -> None:
    """No attention or cache marker is left, every site has its attention call, and nothing expands latents any more."""
    if sorted(graph.attention) != [site.layer for site in graph.sites]:
        raise InvariantError(f"absorb_mla: attention emitted for layers {sorted(graph.attention)}")
    for site in graph.sites:
        users = [user for user in site.weight.users if user.target is not aten.view.default]
        if users:
            raise InvariantError(f"absorb_mla: {site.where} still reads its up-projection through {users}")


def _describe_pool(site: MLASite, context: PassContext) -> None:
    """Give the cache input shape and element type of the pool it will receive."""
    stand_in = value(site.kv_cache)
    with stand_in.fake_mode:
        site.kv_cache.meta["val"] = stand_in.new_empty(
            context.pages, context.block_size, site.latent_dim + site.rope_dim, dtype=context.kv_dtype
        )


def _absorb(graph: StepGraph, site: MLASite, context: PassContext) -> Attention:
    nodes = graph.graph
    dead, _ = cone([site.key, site.value], [site.latent_new, site.rope_new])
    emit = Emitter(nodes, like=site.attention)
    heads, split = site.heads, site.nope_dim + site.value_dim
    own_weight = None if site.own is None else _own_weight(graph, site, context)
    with nodes.inserting_before(site.attention):
        per_head = own_per_head = emit(aten.view.default, site.weight, [heads, split, site.latent_dim])
        if own_weight is not None:
            own_per_head = emit(aten.view.default, own_weight, [site.own_heads, split, site.latent_dim])
        w_uk = emit(aten.slice.Tensor, per_head, 1, 0, site.nope_dim)
        w_uv = emit(aten.slice.Tensor, own_per_head, 1, site.nope_dim, split)

        def query(start: int, end: int) -> fx.Node:  # [T, H, 1, d] -> [H, T, d]
            part = _cat_operand(site.query, start, end) or emit(aten.slice.Tensor, site.query, 3, start, end)
            return emit(aten.reshape.default, emit(aten.permute.default, part, [1, 0, 2, 3]), [heads, -1, end - start])

        q_nope, q_rope = query(0, site.nope_dim), query(site.nope_dim, site.nope_dim + site.rope_dim)
        q_latent = emit(aten.permute.default, emit(aten.bmm.default, q_nope, w_uk), [1, 0, 2])  # [T, H, R]
        q_rope = emit(aten.permute.default, q_rope, [1, 0, 2])
        attention = emit_attention(emit, site, context, q_latent, q_rope)

        out = emit(aten.permute.default, attention.own, [1, 0, 2])  # [h, T, R]
        out = emit(aten.bmm.default, out, emit(aten.permute.default, w_uv, [0, 2, 1]))  # [h, T, Dv]
        out = emit(aten.permute.default, out, [1, 0, 2])
        # The marker's fake output is contiguous, and the model may view it: the replacement must be, too.
        out = emit(aten.clone.default, out, memory_format=torch.contiguous_format)
        out = emit(aten.unsqueeze.default, out, 1)  # [T, 1, h, Dv]
    replaced = site.attention if site.own is None else site.own
    _check_same(site, replaced, out)
    replaced.replace_all_uses_with(out)
    erase_unused(nodes, {replaced, site.attention})
    erase_unused(nodes, dead | {site.marker} | set(site.marker.users))
    return attention


def _own_weight(graph: StepGraph, site: MLASite, context: PassContext) -> fx.Node:
    """A constant of its own for the up-projections of the heads that the model goes on with; a slice would have the
    rank's number in the graph, and graphs of all ranks are equal."""
    part, parts = graph.constants[site.own.args[1]], site.own.args[2]
    if (int(part), parts) != (context.rank, context.dcp_size):
        raise InvariantError(
            f"absorb_mla: {site.where} goes on with part {int(part)} of {parts} of its heads on rank {context.rank} of "
            f"{context.dcp_size}"
        )
    rows = value(site.weight).shape[0] // parts
    with graph.graph.inserting_after(site.weight):
        node = graph.graph.placeholder(f"{site.weight.name}_own")
    own = slice(context.rank * rows, (context.rank + 1) * rows)
    with value(site.weight).fake_mode:
        node.meta["val"] = value(site.weight)[own]
    graph.constants[node] = graph.constants[site.weight].detach()[own]
    return node


def _cat_operand(query: fx.Node, start: int, end: int) -> fx.Node | None:
    """The operand that makes up ``query[..., start:end]``, where the query is put together from its parts."""
    if query.target is not aten.cat.default or query.args[1:] not in ((3,), (-1,)):
        return None
    offset = 0
    for operand in query.args[0]:
        size = value(operand).shape[3]
        if (start, end) == (offset, offset + size):
            return operand
        offset += size
    return None


def _check_same(site: MLASite, replaced: fx.Node, out: fx.Node) -> None:
    wanted, found = value(replaced), value(out)
    if (wanted.shape, wanted.dtype) != (found.shape, found.dtype) or not found.is_contiguous():
        raise InvariantError(
            f"absorb_mla: {site.where}: the absorbed output is {found.dtype} {tuple(found.shape)} with strides "
            f"{found.stride()}, the model's was {wanted.dtype} {tuple(wanted.shape)}"
        )
