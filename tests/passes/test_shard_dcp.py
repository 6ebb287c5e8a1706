# SPDX-License-Identifier: Apache-2.0
"""Collectives per layer, their order, and what the pass checks about them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dcp_compile.capture import StepGraph
from dcp_compile.errors import InvariantError
from dcp_compile.passes import PASSES, PassContext, run_passes, shard_dcp
from dcp_compile.passes.graph_tools import Emitter, aten, census, dcp, nodes_of, value
from dcp_compile.passes.shard_dcp import is_collective
from tests.passes.models import CONTEXT, Captured

c10d = torch.ops._c10d_functional
SHARD = (shard_dcp,)
REPLICATED = dataclasses.replace(CONTEXT, dcp_size=2, group="ranks")
SHARDED = dataclasses.replace(REPLICATED, heads_sharded=True)
BOTH = pytest.mark.parametrize("context", [REPLICATED, SHARDED], ids=["replicated", "sharded"])


def before_sharding(captured: Captured, context: PassContext) -> StepGraph:
    graph = captured.graph()
    run_passes(graph, context, PASSES[: PASSES.index(shard_dcp)])
    return graph


def sharded(captured: Captured, context: PassContext) -> StepGraph:
    graph = before_sharding(captured, context)
    (result,) = run_passes(graph, context, SHARD)
    assert result.matches == len(captured.mla_layers)
    return graph


def collectives(graph: StepGraph) -> list:
    return [node for node in graph.graph.nodes if node.op == "call_function" and is_collective(node)]


def test_one_rank_needs_no_collective(captured: Captured) -> None:
    graph = before_sharding(captured, CONTEXT)
    before = [node.format_node() for node in graph.graph.nodes]
    (result,) = run_passes(graph, CONTEXT, SHARD)
    assert result.matches == 0 and [node.format_node() for node in graph.graph.nodes] == before


def test_replicated_heads_gather_partials_once_per_layer(captured: Captured) -> None:
    graph = sharded(captured, REPLICATED)
    calls = collectives(graph)
    assert [node.target for node in calls] == [c10d.all_gather_into_tensor.default] * len(graph.sites)
    for site, call in zip(graph.sites, calls):
        rows, heads, width = value(call.args[0]).shape
        lanes = 2 if value(call.args[0]).dtype == torch.bfloat16 else 1
        assert (heads, width) == (site.heads, site.latent_dim + lanes)
        assert call.args[1:] == (2, "ranks")


def test_sharded_heads_gather_queries_and_exchange_partials(captured: Captured) -> None:
    graph = sharded(captured, SHARDED)
    each = [c10d.all_gather_into_tensor.default, c10d.all_to_all_single.default]
    calls = collectives(graph)
    assert [node.target for node in calls] == each * len(graph.sites)
    for site, gather, exchange in zip(graph.sites, calls[::2], calls[1::2]):
        heads, _, width = value(gather.args[0]).shape
        assert (heads, width) == (site.heads, site.latent_dim + site.rope_dim)
        assert value(exchange.args[0]).shape[1:] == (site.heads, site.latent_dim + 1)
        attention = graph.attention[site.layer]
        assert value(attention.q_latent).shape[1:] == (site.heads, site.latent_dim)
        assert value(attention.out).shape[1:] == (2 * site.heads, site.latent_dim)


@BOTH
@pytest.mark.parametrize("layout, each", [
    ("split", {"mla_prefix": 1, "mla_tail": 1, "merge_partials": 1, "mla_rows": 0}),
    ("flattened", {"mla_rows": 1, "mla_prefix": 0, "merge_partials": 0}),
])  # fmt: skip
def test_attention_is_emitted_once(deepseek: Captured, context: PassContext, layout: str, each: dict[str, int]) -> None:
    graph = sharded(deepseek, dataclasses.replace(context, layout=layout))
    calls = census(graph.graph)
    assert {name: calls[f"dcp::{name}"] for name in each} == {name: 2 * count for name, count in each.items()}
    assert calls["dcp::pack_partials"] == calls["dcp::merge_packed"] == 2


@BOTH
def test_every_collective_is_waited_for(captured: Captured, context: PassContext) -> None:
    graph = sharded(captured, context)
    for call in collectives(graph):
        assert [user.target for user in call.users] == [c10d.wait_tensor.default]


@BOTH
def test_a_second_run_finds_nothing(captured: Captured, context: PassContext) -> None:
    graph = sharded(captured, context)
    before = [node.format_node() for node in graph.graph.nodes]
    (result,) = run_passes(graph, context, SHARD)
    assert result.matches == 0 and [node.format_node() for node in graph.graph.nodes] == before


# --- graphs broken by hand -------------------------------------------------------------------------------------------


@BOTH
def test_a_collective_that_is_not_waited_for_is_caught(deepseek: Captured, context: PassContext) -> None:
    graph = sharded(deepseek, context)
    wait = nodes_of(graph.graph, c10d.wait_tensor.default)[-1]
    wait.replace_all_uses_with(wait.args[0])
    graph.graph.erase_node(wait)
    with pytest.raises(InvariantError, match="is waited for 0 times"):
        shard_dcp.check(graph, context)


@BOTH
def test_a_result_that_is_read_before_the_wait_is_caught(deepseek: Captured, context: PassContext) -> None:
    graph = sharded(deepseek, context)
    call = collectives(graph)[0]
    with graph.graph.inserting_after(call):
        Emitter(graph.graph, like=call)(aten.neg.default, call)
    with pytest.raises(InvariantError, match="is waited for"):
        shard_dcp.check(graph, context)


def test_a_layer_without_merge_is_caught(deepseek: Captured) -> None:
    graph = sharded(deepseek, REPLICATED)
    merge = nodes_of(graph.graph, dcp.merge_packed.default)[0]
    merge.replace_all_uses_with(graph.attention[0].out)
    graph.graph.erase_node(merge)
    with pytest.raises(InvariantError, match="1 merges for 2 sites"):
        shard_dcp.check(graph, REPLICATED)


def test_layers_with_different_collectives_are_caught(deepseek: Captured) -> None:
    """Ranks must meet in one order: a layer that differs from the others is a hang waiting to happen."""
    graph = sharded(deepseek, SHARDED)
    gather = collectives(graph)[0]
    wait = next(iter(gather.users))
    wait.replace_all_uses_with(gather.args[0])
    for node in (wait, gather):
        graph.graph.erase_node(node)
    with pytest.raises(InvariantError, match="collectives of layer 1 .* differ from those of layer 0"):
        shard_dcp.check(graph, SHARDED)
