# SPDX-License-Identifier: Apache-2.0
"""Lower recurrent layers to operators on slot-indexed state.

In a step graph every valid row is committed at once. In a verify graph the rows stay pending and the rows accepted from
the previous verify step are committed first: one read and one write of the state per step, whatever the draft length.
"""

from __future__ import annotations

from torch import fx

from dcp_compile.capture import StepGraph
from dcp_compile.errors import InvariantError

from .context import PassContext, PassResult
from .graph_tools import MARKERS, Emitter, dcp, nodes_of, value


def run(graph: StepGraph, context: PassContext) -> PassResult:
    """Replace every recurrence and convolution marker."""
    found = nodes_of(graph.graph, dcp.mark_conv.default, dcp.mark_recurrence.default)
    for node in found:
        lower = _lower_conv if node.target is dcp.mark_conv.default else _lower_recurrence
        with graph.graph.inserting_before(node):
            out = lower(Emitter(graph.graph, like=node), node, context)
        node.replace_all_uses_with(out)
        graph.graph.erase_node(node)
    return PassResult("lower_kda", len(found))


def check(graph: StepGraph, context: PassContext) -> None:
    """No marker is left, and every state is written by exactly one operator."""
    left = [node.name for node in nodes_of(graph.graph, *MARKERS)]
    if left:
        raise InvariantError(f"lower_kda: marker operators left: {left}")
    for placeholder, ref in graph.states.items():
        if ref.kind in ("state", "conv_state") and len(placeholder.users) != 1:
            raise InvariantError(
                f"lower_kda: {ref.kind} of layer {ref.layer} has {len(placeholder.users)} users, not 1"
            )


def _describe(node: fx.Node, *shape: int) -> None:
    """Give a state input the shape of the pool it will receive."""
    stand_in = value(node)
    with stand_in.fake_mode:
        node.meta["val"] = stand_in.new_empty(shape)


def _lower_conv(emit: Emitter, node: fx.Node, context: PassContext) -> fx.Node:
    x, conv_state, pending, accepted, state_slots, positions, _, width = node.args
    channels = value(x).shape[1]
    _describe(conv_state, context.state_slots, channels, width - 1)
    _describe(pending, context.state_slots, channels, context.verify_rows)
    if context.verify:
        return emit(dcp.conv_window_verify.default, x, conv_state, pending, accepted, state_slots, positions)
    return emit(dcp.conv_window.default, x, conv_state, state_slots, positions)


def _lower_recurrence(emit: Emitter, node: fx.Node, context: PassContext) -> fx.Node:
    q, k, v, g, beta, state, *pendings, accepted, state_slots, positions, _, scale, qk_l2norm = node.args
    _, _, heads, key_dim = value(k).shape
    value_dim = value(v).shape[3]
    _describe(state, context.state_slots, heads, key_dim, value_dim)
    for pending, dim in zip(pendings, (key_dim, value_dim, key_dim)):
        _describe(pending, context.state_slots, context.verify_rows, heads, dim)
    tail = (state_slots, positions, scale, qk_l2norm)
    if context.verify:
        return emit(dcp.kda_verify.default, q, k, v, g, beta, state, *pendings, accepted, *tail)
    return emit(dcp.kda.default, q, k, v, g, beta, state, *tail)
