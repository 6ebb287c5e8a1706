# SPDX-License-Identifier: Apache-2.0
"""One write per layer, in front of everything that reads its cache."""

from __future__ import annotations

import pytest

from dcp_compile.capture import StepGraph
from dcp_compile.errors import InvariantError
from dcp_compile.passes import absorb_mla, insert_kv_write, match_mla, run_passes
from dcp_compile.passes.graph_tools import dcp, nodes_of
from tests.passes.models import CONTEXT, Captured

WRITE = (insert_kv_write,)


def written(captured: Captured) -> tuple[StepGraph, list]:
    graph = captured.graph()
    run_passes(graph, CONTEXT, (match_mla, absorb_mla))
    results = run_passes(graph, CONTEXT, WRITE)
    return graph, results


def test_each_layer_writes_its_latents_to_its_own_slots(captured: Captured) -> None:
    graph, (result,) = written(captured)
    writes = nodes_of(graph.graph, dcp.kv_write.default)
    assert result.matches == len(writes) == len(graph.sites)
    order = {node: index for index, node in enumerate(graph.graph.nodes)}
    for site, write in zip(graph.sites, writes):
        latent, rope, cache, slots, kv_scale = write.args
        assert cache is site.kv_cache and kv_scale == 1
        assert latent.args[0] is site.latent_new and rope.args[0] is site.rope_new
        assert slots.target is dcp.cp_local_slot.default
        assert slots.args == (site.positions, site.block_table, CONTEXT.block_size, 0, 1, 1)
        readers = [user for user in cache.users if user is not write]
        assert readers and all(order[write] < order[reader] for reader in readers)


def test_writes_survive_dead_code_elimination(deepseek: Captured) -> None:
    graph, _ = written(deepseek)
    graph.graph.eliminate_dead_code()
    assert len(nodes_of(graph.graph, dcp.kv_write.default)) == 2


def test_a_second_run_finds_nothing(captured: Captured) -> None:
    graph, _ = written(captured)
    before = [node.format_node() for node in graph.graph.nodes]
    (result,) = run_passes(graph, CONTEXT, WRITE)
    assert result.matches == 0 and [node.format_node() for node in graph.graph.nodes] == before


# --- graphs broken by hand -------------------------------------------------------------------------------------------


def test_a_write_behind_its_reader_is_caught(deepseek: Captured) -> None:
    graph, _ = written(deepseek)
    write = nodes_of(graph.graph, dcp.kv_write.default)[0]
    graph.attention[0].out.append(write)
    with pytest.raises(InvariantError, match=f"reads the cache before {write.name} fills it"):
        insert_kv_write.check(graph, CONTEXT)


def test_a_missing_write_is_caught(deepseek: Captured) -> None:
    graph, _ = written(deepseek)
    graph.graph.erase_node(nodes_of(graph.graph, dcp.kv_write.default)[0])
    with pytest.raises(InvariantError, match="1 writes for 2 sites"):
        insert_kv_write.check(graph, CONTEXT)


def test_swapped_caches_are_caught(deepseek: Captured) -> None:
    """Both writes are there and both come before the reader at their own place."""
    graph, _ = written(deepseek)
    first, second = nodes_of(graph.graph, dcp.kv_write.default)
    one, other = first.args[2], second.args[2]
    first.update_arg(2, other)
    second.update_arg(2, one)
    with pytest.raises(InvariantError, match="does not store the latent"):
        insert_kv_write.check(graph, CONTEXT)


def test_two_writes_to_one_cache_are_caught(deepseek: Captured) -> None:
    graph, _ = written(deepseek)
    first, second = nodes_of(graph.graph, dcp.kv_write.default)
    second.update_arg(2, first.args[2])
    with pytest.raises(InvariantError, match="does not store the latent"):
        insert_kv_write.check(graph, CONTEXT)


def test_latents_of_another_layer_are_caught(deepseek: Captured) -> None:
    graph, _ = written(deepseek)
    first, second = nodes_of(graph.graph, dcp.kv_write.default)
    second.update_arg(0, first.args[0])
    with pytest.raises(InvariantError, match="kv_write.* does not store the latent of"):
        insert_kv_write.check(graph, CONTEXT)
