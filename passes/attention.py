# SPDX-License-Identifier: Apache-2.0
"""Emitting one layer's partial attention in the chosen decode layout."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from .context import PassContext
from .graph_tools import Emitter, aten, dcp

if TYPE_CHECKING:
    from .match_mla import MLASite


@dataclass(frozen=True)
class Attention:
    """The attention of one layer as emitted.

    Attributes:
        q_latent, q_rope: queries that the model makes on this rank, ``[T, H, R]``, ``[T, H, rope]``.
        out, lse: its results ``[T, H, R]``, ``[T, H]``.
        own: of ``out``, the heads that the model goes on with, ``[T, h, R]``.
        calls: every node emitted for it, in order.
    """

    q_latent: fx.Node
    q_rope: fx.Node
    out: fx.Node
    lse: fx.Node
    own: fx.Node
    calls: tuple[fx.Node, ...]


def emit_attention(emit: Emitter, site: MLASite, context: PassContext, q_latent: fx.Node, q_rope: fx.Node) -> Attention:
    """Attention of ``site`` over this rank's pages.

    The model goes on with all heads of the queries, or with its run of them where it says so (``site.own``).

    flattened: every row is on its own, with its own bound. split: all rows of a request share one bound over the prefix
    of final tokens, a small second call covers the rest, and the two merge by their LSE. tail: the prefix is out of
    sight, and that second call is all there is.
    """
    place = (context.rank, context.dcp_size, context.interleave)
    calls: list[fx.Node] = []

    def add(target, *args) -> fx.Node:
        calls.append(emit(target, *args))
        return calls[-1]

    def pair(target, *args) -> tuple[fx.Node, fx.Node]:
        both = add(target, *args)
        return add(operator.getitem, both, 0), add(operator.getitem, both, 1)

    query = (q_latent, q_rope, site.kv_cache, site.block_table)
    how = (site.scale, context.backend, context.kv_scale)
    requests = add(dcp.row_requests.default, site.positions)
    visible = dcp.row_bounds if context.causal else dcp.block_bounds
    bounds = add(visible.default, site.positions, *place)
    if context.layout == "flattened":
        out, lse = pair(dcp.mla_rows.default, *query, requests, bounds, *how)
    else:
        prefix = add(dcp.prefix_bounds.default, site.prefix_lengths, *place)
        keys = context.window // context.dcp_size
        out, lse = pair(dcp.mla_tail.default, *query, requests, prefix, bounds, *how, *([keys] if keys else []))
        if context.layout == "split":
            parts = [pair(dcp.mla_prefix.default, *query, prefix, *how), (out, lse)]
            outs = add(aten.stack.default, [part[0] for part in parts])
            lses = add(aten.stack.default, [part[1] for part in parts])
            out, lse = pair(dcp.merge_partials.default, outs, lses)
    own = out
    if site.own is not None:
        own = add(aten.slice.Tensor, out, 1, context.rank * site.own_heads, (context.rank + 1) * site.own_heads)
    return Attention(q_latent, q_rope, out, lse, own, tuple(calls))
