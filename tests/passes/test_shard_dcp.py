# SPDX-License-Identifier: Apache-2.0
"""Collectives per layer, their order, and what the pass checks about them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dcp_compile.capture import StepGraph
from dcp_compile.errors import InvariantError
from dcp_compile.passes import PASSES, PassContext, run_passes, shard_dcp
from dcp_compile.passes.fingerprint import graph_fingerprint
from dcp_compile.passes.graph_tools import Emitter, aten, census, nodes_of, value
from dcp_compile.passes.shard_dcp import GATHER, MERGE
from tests.passes.models import CONTEXT, Captured, captured_part

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


def exchanges(graph: StepGraph) -> list:
    return nodes_of(graph.graph, GATHER, MERGE)


def test_one_rank_needs_no_collective(captured: Captured) -> None:
    graph = before_sharding(captured, CONTEXT)
    before = [node.format_node() for node in graph.graph.nodes]
    (result,) = run_passes(graph, CONTEXT, SHARD)
    assert result.matches == 0 and [node.format_node() for node in graph.graph.nodes] == before


def test_replicated_heads_merge_all_partials_once_per_layer(captured: Captured) -> None:
    graph = sharded(captured, REPLICATED)
    calls = exchanges(graph)
    assert [node.target for node in calls] == [MERGE] * len(graph.sites)
    for site, call in zip(graph.sites, calls):
        assert value(call.args[0]).shape[1:] == value(call).shape[1:] == (site.heads, site.latent_dim)
        assert call.args[2:] == (site.heads, 2, "ranks")


def test_sharded_heads_gather_queries_and_merge_their_own_partials(captured: Captured) -> None:
    graph = sharded(captured, SHARDED)
    calls = exchanges(graph)
    assert [node.target for node in calls] == [GATHER, MERGE] * len(graph.sites)
    for site, gather, merge in zip(graph.sites, calls[::2], calls[1::2]):
        width = site.latent_dim + site.rope_dim
        assert value(gather.args[0]).shape[1:] == (site.heads, width)
        assert value(gather).shape[1:] == (2 * site.heads, width)
        assert value(merge.args[0]).shape[1:] == (2 * site.heads, site.latent_dim)
        assert value(merge).shape[1:] == (site.heads, site.latent_dim)
        attention = graph.attention[site.layer]
        assert value(attention.q_latent).shape[1:] == (site.heads, site.latent_dim)
        assert attention.out is merge.args[0]


def test_queries_that_every_rank_makes_are_not_gathered() -> None:
    """Attention runs on the heads of both ranks, all behind it on the own ones; graphs do not tell ranks apart."""
    fingerprints = []
    for rank in range(2):
        part = captured_part(rank)
        graph = part.graph()
        run_passes(graph, dataclasses.replace(SHARDED, rank=rank))
        (site,), (merge,) = graph.sites, exchanges(graph)
        assert merge.target is MERGE and (site.heads, site.own_heads) == (4, 2)
        assert value(merge.args[0]).shape[1:] == (4, site.latent_dim) and value(merge).shape[1:] == (2, site.latent_dim)
        assert "dcp::own_heads" not in census(graph.graph)
        weight, own = (tensor for node, tensor in graph.constants.items() if node.name.startswith(site.weight.name))
        assert own.equal(weight.chunk(2)[rank]) and own.data_ptr() == weight.chunk(2)[rank].data_ptr()
        fingerprints.append(graph_fingerprint(graph))
    assert fingerprints[0] == fingerprints[1]


@pytest.mark.parametrize("place", [{"rank": 1}, {"dcp_size": 4}])
def test_a_part_for_another_place_is_caught(place: dict[str, int]) -> None:
    with pytest.raises(InvariantError, match="goes on with part 0 of 2 of its heads on rank"):
        run_passes(captured_part(0).graph(), dataclasses.replace(SHARDED, **place), PASSES[:2])


@BOTH
@pytest.mark.parametrize("layout, each", [
    ("split", {"mla_prefix": 1, "mla_tail": 1, "merge_partials": 1, "mla_rows": 0}),
    ("flattened", {"mla_rows": 1, "mla_prefix": 0, "merge_partials": 0}),
])  # fmt: skip
def test_attention_is_emitted_once(deepseek: Captured, context: PassContext, layout: str, each: dict[str, int]) -> None:
    graph = sharded(deepseek, dataclasses.replace(context, layout=layout))
    calls = census(graph.graph)
    assert {name: calls[f"dcp::{name}"] for name in each} == {name: 2 * count for name, count in each.items()}
    assert calls["dcp::merge_ranks"] == 2


@BOTH
def test_a_second_run_finds_nothing(captured: Captured, context: PassContext) -> None:
    graph = sharded(captured, context)
    before = [node.format_node() for node in graph.graph.nodes]
    (result,) = run_passes(graph, context, SHARD)
    assert result.matches == 0 and [node.format_node() for node in graph.graph.nodes] == before


# --- graphs broken by hand -------------------------------------------------------------------------------------------


@pytest.fixture
def summing(deepseek: Captured) -> StepGraph:
    """A graph in which the model's own sum over ranks follows the first layer's attention, in the same group."""
    graph = sharded(deepseek, SHARDED)
    out = exchanges(graph)[1]
    with graph.graph.inserting_after(out):
        emit = Emitter(graph.graph, like=out)
        total = emit(c10d.all_reduce.default, out, "sum", "ranks")
    with graph.graph.inserting_after(total):
        wait = emit(c10d.wait_tensor.default, total)
    out.replace_all_uses_with(wait, delete_user_cb=lambda user: user is not total)
    return graph


def test_sums_of_the_model_in_the_same_group_are_its_own_affair(summing: StepGraph) -> None:
    shard_dcp.check(summing, SHARDED)


def test_a_collective_that_is_not_waited_for_is_caught(summing: StepGraph) -> None:
    (wait,) = nodes_of(summing.graph, c10d.wait_tensor.default)
    wait.replace_all_uses_with(wait.args[0])
    summing.graph.erase_node(wait)
    with pytest.raises(InvariantError, match="is waited for 0 times"):
        shard_dcp.check(summing, SHARDED)


def test_a_result_that_is_read_before_the_wait_is_caught(summing: StepGraph) -> None:
    (call,) = nodes_of(summing.graph, c10d.all_reduce.default)
    with summing.graph.inserting_after(call):
        Emitter(summing.graph, like=call)(aten.neg.default, call)
    with pytest.raises(InvariantError, match="is waited for"):
        shard_dcp.check(summing, SHARDED)


def test_a_layer_without_merge_is_caught(deepseek: Captured) -> None:
    graph = sharded(deepseek, REPLICATED)
    merge = nodes_of(graph.graph, MERGE)[0]
    merge.replace_all_uses_with(graph.attention[0].out)
    graph.graph.erase_node(merge)
    with pytest.raises(InvariantError, match="1 merges for 2 sites"):
        shard_dcp.check(graph, REPLICATED)


def test_a_layer_that_does_not_gather_is_caught(deepseek: Captured) -> None:
    """Ranks must meet in one order: a layer that differs from the others is a hang waiting to happen."""
    graph = sharded(deepseek, SHARDED)
    gather = exchanges(graph)[0]
    gather.replace_all_uses_with(gather.args[0])
    graph.graph.erase_node(gather)
    with pytest.raises(InvariantError, match=r"layer 0 meets the other ranks in \['dcp::merge_ranks'\] instead of"):
        shard_dcp.check(graph, SHARDED)
