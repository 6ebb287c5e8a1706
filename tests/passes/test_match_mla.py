# SPDX-License-Identifier: Apache-2.0
"""Which attention layers are certified, and why the others are not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dcp_compile.capture import capture
from dcp_compile.errors import InvariantError, MatchError, UnsupportedModelError
from dcp_compile.passes import match_mla, run_passes
from dcp_compile.passes.graph_tools import aten, dcp, nodes_of, value
from tests import mla_variants
from tests.mla_variants import vary
from tests.model_state import changes, state_of
from tests.passes.models import CONTEXT, Captured

MATCH = (match_mla,)


def listing(graph) -> list[str]:
    return [node.format_node() for node in graph.graph.nodes]


def test_every_mla_layer_is_a_site_with_the_models_sizes(captured: Captured) -> None:
    graph, config = captured.graph(), captured.model.config
    before = listing(graph)
    (result,) = run_passes(graph, CONTEXT, MATCH)
    assert listing(graph) == before  # matching changes nothing
    assert result.matches == len(captured.mla_layers)
    assert [site.layer for site in graph.sites] == captured.mla_layers
    for site in graph.sites:
        attention = captured.model.model.layers[site.layer].self_attn
        assert site.where.endswith(f"model.layers.{site.layer}.self_attn")
        assert site.heads == config.num_attention_heads
        assert site.nope_dim == config.qk_nope_head_dim and site.rope_dim == config.qk_rope_head_dim
        assert site.value_dim == config.v_head_dim and site.latent_dim == config.kv_lora_rank
        assert site.scale == attention.scaling
        assert graph.constants[site.weight] is not None
        assert graph.constants[site.weight].data_ptr() == attention.kv_b_proj.weight.data_ptr()
        assert graph.states[site.kv_cache].layer == site.layer
        assert graph.step_inputs[site.block_table] == "block_table"
        assert graph.step_inputs[site.positions] == "positions"
        assert graph.step_inputs[site.prefix_lengths] == "prefix_lengths"


def test_this_steps_latents_do_not_come_from_the_cache(captured: Captured) -> None:
    graph = captured.graph()
    run_passes(graph, CONTEXT, MATCH)
    for site in graph.sites:
        assert value(site.latent_new).shape[-1] == site.latent_dim and value(site.rope_new).shape[-1] == site.rope_dim
        assert not match_mla._depends(site.latent_new, site.marker)
        assert not match_mla._depends(site.rope_new, site.marker)
        returned = match_mla._depends(site.latent, site.marker), match_mla._depends(site.rope, site.marker)
        assert returned == (captured.name != "expanded",) * 2


def test_a_second_run_finds_nothing(captured: Captured) -> None:
    graph = captured.graph()
    run_passes(graph, CONTEXT, MATCH)
    sites, before = list(graph.sites), listing(graph)
    (result,) = run_passes(graph, CONTEXT, MATCH)
    assert result.matches == 0 and graph.sites == sites and listing(graph) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_certificate_is_exact_in_two_byte_types(dtype: torch.dtype) -> None:
    """Wide enough for sums of products to pass what the type can hold."""
    model = vary(mla_variants.Variant, dtype=dtype, kv_lora_rank=320)
    graph = capture(model)
    run_passes(graph, CONTEXT, MATCH)
    assert len(graph.sites) == 1


@pytest.mark.parametrize("name, heads", [("SqueezesTheLatent", 4), ("TransposesTheLatent", 1)])
def test_axes_of_size_one_between_cache_and_up_projection(name: str, heads: int) -> None:
    """The head axis taken off or moved: the latent is still what the model handed to its cache."""
    graph = capture(vary(getattr(mla_variants, name), num_attention_heads=heads, num_key_value_heads=heads))
    run_passes(graph, CONTEXT, MATCH)
    (site,) = graph.sites
    assert (site.latent_new, site.rope_new) == site.marker.args[:2]
    assert site.heads == heads


REFUSED = {
    "NormsKeys": "the key passes through aten.mul",
    "ClampsKeys": "the key passes through aten.clamp",
    "FlipsKeyHeads": "the key passes through aten.flip",
    "SwapsKeyHalves": r"the key is not \[latent @ W_uk \| k_rope\] \(max difference",
    "SwapsValueHeads": r"the value is not latent @ W_uv \(max difference",
    "ScalesValues": "the value passes through aten.mul",
    "ScalesTheCachedLatent": "the latent that attention uses is computed from the cached one by aten.mul",
    "ScalesTheCachedRope": "the rope key that attention uses is computed from the cached one by aten.neg",
    "QuantisedUpProjection": "weight is computed in the graph by aten.div.*load kv_b_proj unquantised",
    "BiasedUpProjection": "the value passes through aten.add",
    "TwoUpProjections": "expected one matrix product above the value, the KV up-projection, but found 2",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_proven_is_refused_whole(name: str) -> None:
    """The message names the layer; neither graph nor model is touched."""
    model = vary(getattr(mla_variants, name))
    before = state_of(model)
    graph = capture(model)
    nodes = listing(graph)
    with pytest.raises(MatchError, match=rf"model\.layers\.0\.self_attn: .*{REFUSED[name]}"):
        run_passes(graph, CONTEXT)
    assert listing(graph) == nodes and graph.sites == [] and graph.attention == {} and graph.prologue is None
    assert changes(before, state_of(model)) == []


def test_one_bad_layer_of_two_refuses_both() -> None:
    model = vary(mla_variants.Variant, 2)
    model.model.layers[1].self_attn.__class__ = mla_variants.ScalesValues
    graph = capture(model)
    nodes = listing(graph)
    with pytest.raises(MatchError, match=r"model\.layers\.1\.self_attn"):
        run_passes(graph, CONTEXT)
    assert listing(graph) == nodes and graph.sites == []


@pytest.mark.parametrize("name, message", [
    ("SkipsTheCache", r"DeepseekV3ForCausalLM: expected one latent call in each of the layers \[0\].*missing: \[0\]"),
    ("IgnoresTheCache", r"DeepseekV3ForCausalLM: expected one latent call in each of the layers \[0\].*missing: \[0\]"),
    ("SlidingWindow", r"layer 0 \(SlidingWindow\): attention option sliding_window=8"),
    ("SoftCap", r"layer 0 \(SoftCap\): attention option softcap=30.0"),
])  # fmt: skip
def test_what_cannot_be_captured_is_refused(name: str, message: str) -> None:
    model = vary(getattr(mla_variants, name))
    before = state_of(model)
    with pytest.raises(UnsupportedModelError, match=message):
        capture(model)
    assert changes(before, state_of(model)) == []


def test_a_model_without_mla_is_named() -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    graph = capture(LlamaForCausalLM(config).eval())
    with pytest.raises(
        UnsupportedModelError, match=r"LlamaForCausalLM: model\.layers\.0\.self_attn is not multi-head latent"
    ):
        run_passes(graph, CONTEXT)


# --- graphs broken by hand -------------------------------------------------------------------------------------------


def test_attention_of_a_layer_whose_cache_is_not_updated(deepseek: Captured) -> None:
    graph = deepseek.graph()
    first, second = nodes_of(graph.graph, dcp.mark_latent.default)
    second.args = (*second.args[:6], 5)
    with pytest.raises(MatchError, match="attention runs without a cache update in layer 1"):
        run_passes(graph, CONTEXT, MATCH)


def test_attention_that_reads_another_layers_cache(deepseek: Captured) -> None:
    """Layers that share keys and values have a cache of their own all the same."""
    graph = deepseek.graph()
    first, second = nodes_of(graph.graph, dcp.mark_latent.default)
    for mine, others in zip(sorted(second.users), sorted(first.users)):
        mine.replace_all_uses_with(others)
    with pytest.raises(MatchError, match=r"layers\.1\.self_attn: attention does not read what the cache returned"):
        run_passes(graph, CONTEXT, MATCH)


@pytest.mark.parametrize("bypassed", [0, 1])
def test_latent_and_rope_key_must_both_come_from_the_cache(deepseek: Captured, bypassed: int) -> None:
    graph = deepseek.graph()
    marker = nodes_of(graph.graph, dcp.mark_latent.default)[0]
    part = next(user for user in marker.users if user.args[1] == bypassed)
    part.replace_all_uses_with(marker.args[bypassed])
    with pytest.raises(MatchError, match=r"layers\.0\.self_attn: attention does not read what the cache returned"):
        run_passes(graph, CONTEXT, MATCH)


def test_a_key_that_reads_something_else(deepseek: Captured) -> None:
    """A second parameter in the key, behind layout operators only."""
    graph = deepseek.graph()
    copy = nodes_of(graph.graph, aten.copy.default)[0]
    other = next(node for node in graph.constants if value(node).dim() == 2)
    with graph.graph.inserting_before(copy):
        wide = graph.graph.call_function(aten.expand.default, (other, [1, 1, 1, 1]))
        wide.meta["val"] = value(copy)
    copy.args = (copy.args[0], wide)
    with pytest.raises(MatchError, match="depend on more than latent, rope key and one weight"):
        run_passes(graph, CONTEXT, MATCH)


def test_the_check_compares_sites_with_attention_calls(deepseek: Captured) -> None:
    graph = deepseek.graph()
    run_passes(graph, CONTEXT, MATCH)
    for wrong in (graph.sites[:1], graph.sites[::-1], [graph.sites[0], graph.sites[0]]):
        broken = dataclasses.replace(graph, sites=wrong)
        with pytest.raises(InvariantError, match="match_mla: sites for layers"):
            match_mla.check(broken, CONTEXT)
