# SPDX-License-Identifier: Apache-2.0
"""Absorbed attention: what is emitted per layer, what disappears, and what the pass checks about it."""

from __future__ import annotations

import dataclasses

import pytest

from dcp_compile.errors import InvariantError
from dcp_compile.passes import PassContext, absorb_mla, match_mla, run_passes
from dcp_compile.passes.graph_tools import MARKERS, Emitter, aten, census, dcp, nodes_of, value
from tests.passes.models import CONTEXT, HYBRID, Captured

BEFORE, ABSORB = (match_mla,), (absorb_mla,)


def absorbed(captured: Captured, context: PassContext = CONTEXT):
    graph = captured.graph()
    run_passes(graph, context, BEFORE)
    (result,) = run_passes(graph, context, ABSORB)
    return graph, result


def test_attention_and_cache_markers_are_gone(captured: Captured) -> None:
    graph, result = absorbed(captured)
    layers = len(captured.mla_layers)
    assert result.matches == layers and sorted(graph.attention) == captured.mla_layers
    left = nodes_of(graph.graph, *MARKERS)
    assert {node.target for node in left} <= {dcp.mark_conv.default, dcp.mark_recurrence.default}
    recurrent = captured.model.config.num_hidden_layers - layers
    assert len(left) == 2 * recurrent


@pytest.mark.parametrize("layout, causal, each", [
    ("split", True, {"row_requests": 1, "row_bounds": 1, "prefix_bounds": 1, "mla_prefix": 1, "mla_tail": 1,
                     "merge_partials": 1}),
    ("flattened", True, {"row_requests": 1, "row_bounds": 1, "mla_rows": 1}),
    ("flattened", False, {"row_requests": 1, "block_bounds": 1, "mla_rows": 1}),
])  # fmt: skip
def test_operators_per_layer(captured: Captured, layout: str, causal: bool, each: dict[str, int]) -> None:
    graph, _ = absorbed(captured, dataclasses.replace(CONTEXT, layout=layout, causal=causal))
    ours = {
        name: count for name, count in census(graph.graph).items() if name.startswith("dcp::") and "mark" not in name
    }
    assert ours == {f"dcp::{name}": count * len(captured.mla_layers) for name, count in each.items()}


def test_latents_are_not_expanded_any_more(captured: Captured) -> None:
    """The up-projection is read through one view per layer; nothing per key is left of it."""
    graph, _ = absorbed(captured)
    for site in graph.sites:
        assert [user.target for user in site.weight.users] == [aten.view.default]
        attention = graph.attention[site.layer]
        assert [str(size) for size in value(attention.q_latent).shape[1:]] == [str(site.heads), str(site.latent_dim)]
        assert [str(size) for size in value(attention.q_rope).shape[1:]] == [str(site.heads), str(site.rope_dim)]
        assert value(site.kv_cache).shape == (CONTEXT.pages, CONTEXT.block_size, site.latent_dim + site.rope_dim)


def test_a_query_put_together_by_the_model_is_taken_apart_again(captured: Captured) -> None:
    """Where it is a cat, neither the cat nor a slice of it is left; where it is one projection, slices are."""
    graph, _ = absorbed(captured)
    for site in graph.sites:
        readers = {user.target for user in site.query.users}
        assert readers == (set() if site.query.target is aten.cat.default else {aten.slice.Tensor})
    joined = {site.query.target is aten.cat.default for site in graph.sites}
    assert joined == {captured.name not in HYBRID}


def test_a_second_run_finds_nothing(captured: Captured) -> None:
    graph, _ = absorbed(captured)
    before = [node.format_node() for node in graph.graph.nodes]
    (result,) = run_passes(graph, CONTEXT, ABSORB)
    assert result.matches == 0 and [node.format_node() for node in graph.graph.nodes] == before


def test_every_new_node_knows_its_layer(deepseek: Captured) -> None:
    graph, _ = absorbed(deepseek)
    for site in graph.sites:
        for node in graph.attention[site.layer].calls:
            assert f"layers.{site.layer}.self_attn" in list(node.meta["nn_module_stack"])[-1]


# --- graphs broken by hand -------------------------------------------------------------------------------------------


def test_a_replacement_of_another_shape_is_caught(deepseek: Captured) -> None:
    graph = deepseek.graph()
    run_passes(graph, CONTEXT, BEFORE)
    graph.sites = [dataclasses.replace(site, value_dim=site.value_dim - 1) for site in graph.sites]
    with pytest.raises((InvariantError, RuntimeError)):
        run_passes(graph, CONTEXT, ABSORB)


def test_a_marker_left_over_is_caught(deepseek: Captured) -> None:
    graph = deepseek.graph()
    run_passes(graph, CONTEXT, BEFORE)
    graph.sites = graph.sites[:1]
    with pytest.raises(InvariantError, match="absorb_mla: marker operators left: .*mark"):
        run_passes(graph, CONTEXT, ABSORB)


def test_an_up_projection_still_in_use_is_caught(deepseek: Captured) -> None:
    graph, _ = absorbed(deepseek)
    site = graph.sites[1]
    with graph.graph.inserting_before(graph.attention[1].calls[0]):
        Emitter(graph.graph, like=graph.attention[1].out)(aten.t.default, site.weight)
    with pytest.raises(InvariantError, match=r"layers\.1\.self_attn still reads its up-projection"):
        absorb_mla.check(graph, CONTEXT)


def test_a_site_without_attention_is_caught(deepseek: Captured) -> None:
    graph, _ = absorbed(deepseek)
    graph.attention.pop(1)
    with pytest.raises(InvariantError, match=r"attention emitted for layers \[0\]"):
        absorb_mla.check(graph, CONTEXT)
