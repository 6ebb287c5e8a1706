# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers on slot-indexed state: a form that commits and one that leaves its rows pending."""

from __future__ import annotations

import dataclasses

import pytest

from dcp_compile.capture import StepGraph
from dcp_compile.errors import InvariantError
from dcp_compile.passes import PASSES, PassContext, lower_kda, run_passes
from dcp_compile.passes.graph_tools import MARKERS, Emitter, aten, census, nodes_of, value
from tests.passes.models import CONTEXT, Captured

LOWER = (lower_kda,)
VERIFY = dataclasses.replace(CONTEXT, verify=True)
FORMS = pytest.mark.parametrize("context", [CONTEXT, VERIFY], ids=["step", "verify"])


def lowered(captured: Captured, context: PassContext) -> StepGraph:
    graph = captured.graph()
    run_passes(graph, context, PASSES[: PASSES.index(lower_kda)])
    (result,) = run_passes(graph, context, LOWER)
    assert result.matches == 2 * (captured.model.config.num_hidden_layers - len(captured.mla_layers))
    return graph


@FORMS
def test_every_marker_becomes_one_operator(captured: Captured, context: PassContext) -> None:
    graph = lowered(captured, context)
    assert nodes_of(graph.graph, *MARKERS) == []
    recurrent = captured.model.config.num_hidden_layers - len(captured.mla_layers)
    calls, suffix = census(graph.graph), "_verify" if context.verify else ""
    other = "" if context.verify else "_verify"
    assert calls[f"dcp::kda{suffix}"] == calls[f"dcp::conv_window{suffix}"] == recurrent
    assert calls[f"dcp::kda{other}"] == calls[f"dcp::conv_window{other}"] == 0


@FORMS
def test_states_are_written_once_and_have_the_models_sizes(hybrid: Captured, context: PassContext) -> None:
    graph = lowered(hybrid, context)
    (heads, head_dim), width = _sizes(hybrid.model.config)
    channels = {"conv_state", "conv_pending"}
    shapes = {}
    for node, ref in graph.states.items():
        if ref.kind != "kv_cache":
            shapes[ref.kind] = tuple(value(node).shape)
            assert len(node.users) == (1 if context.verify or ref.kind in ("state", "conv_state") else 0)
    assert shapes["state"] == (3, heads, head_dim, head_dim)
    assert shapes["pending_k"] == shapes["pending_u"] == shapes["pending_g"] == (3, 4, heads, head_dim)
    assert {shapes[kind][1] for kind in channels} == {3 * heads * head_dim}
    assert shapes["conv_state"][::2] == (3, width - 1) and shapes["conv_pending"][::2] == (3, 4)


def _sizes(config) -> tuple[tuple[int, int], int]:
    linear = getattr(config, "linear_attn_config", None)
    if linear is not None:
        return (linear["num_heads"], linear["head_dim"]), linear["short_conv_kernel_size"]
    return (config.linear_num_heads, config.linear_head_dim), config.linear_conv_kernel_dim


def test_recurrent_state_is_float32_whatever_the_model_is(hybrid: Captured) -> None:
    graph = lowered(hybrid, CONTEXT)
    kinds = {ref.kind: value(node).dtype for node, ref in graph.states.items()}
    assert str(kinds["state"]) == "torch.float32"


@FORMS
def test_a_second_run_finds_nothing(captured: Captured, context: PassContext) -> None:
    graph = lowered(captured, context)
    before = [node.format_node() for node in graph.graph.nodes]
    (result,) = run_passes(graph, context, LOWER)
    assert result.matches == 0 and [node.format_node() for node in graph.graph.nodes] == before


# --- graphs broken by hand -------------------------------------------------------------------------------------------


def test_a_marker_left_over_is_caught(hybrid: Captured) -> None:
    graph = hybrid.graph()
    run_passes(graph, CONTEXT, PASSES[: PASSES.index(lower_kda)])
    with pytest.raises(InvariantError, match="lower_kda: marker operators left: .*mark_conv.*mark_recurrence"):
        lower_kda.check(graph, CONTEXT)


@pytest.mark.parametrize("kind", ["state", "conv_state"])
def test_a_state_that_something_else_reads_is_caught(hybrid: Captured, kind: str) -> None:
    """Its value would depend on the order of the write and the read."""
    graph = lowered(hybrid, CONTEXT)
    state = next(node for node, ref in graph.states.items() if ref.kind == kind)
    with graph.graph.inserting_before(next(iter(state.users))):
        Emitter(graph.graph, like=state)(aten.clone.default, state)
    with pytest.raises(InvariantError, match=f"lower_kda: {kind} of layer 0 has 2 users, not 1"):
        lower_kda.check(graph, CONTEXT)


def test_a_state_that_nothing_writes_is_caught(hybrid: Captured) -> None:
    graph = lowered(hybrid, CONTEXT)
    state = next(node for node, ref in graph.states.items() if ref.kind == "state")
    other = next(node for node, ref in graph.states.items() if ref.kind == "pending_k")
    state.replace_all_uses_with(other)
    with pytest.raises(InvariantError, match="lower_kda: state of layer 0 has 0 users, not 1"):
        lower_kda.check(graph, CONTEXT)
