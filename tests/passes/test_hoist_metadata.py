# SPDX-License-Identifier: Apache-2.0
"""One prologue per step, whatever the number of layers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dcp_compile.capture import METADATA_INPUTS, StepGraph, capture
from dcp_compile.errors import InvariantError
from dcp_compile.passes import PASSES, PassContext, hoist_metadata, run_passes
from dcp_compile.passes.graph_tools import METADATA, Emitter, aten, census, dcp, nodes_of, value
from tests.passes.models import CONTEXT, Captured
from tests.tiny_models import tiny_deepseek_v3

HOIST = (hoist_metadata,)
CONTEXTS = {
    "split": CONTEXT,
    "flattened": dataclasses.replace(CONTEXT, layout="flattened"),
    "sharded": dataclasses.replace(CONTEXT, dcp_size=3, rank=1, interleave=2, group="ranks"),
    "block": dataclasses.replace(CONTEXT, layout="flattened", causal=False),
}
EVERY = pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)


def hoisted(captured: Captured, context: PassContext) -> StepGraph:
    graph = captured.graph()
    run_passes(graph, context, PASSES[: PASSES.index(hoist_metadata) + 1])
    return graph


@EVERY
def test_the_body_has_no_metadata_and_the_prologue_one_call(captured: Captured, context: PassContext) -> None:
    graph = hoisted(captured, context)
    assert nodes_of(graph.graph, *METADATA) == []
    fused = dcp.step_metadata if context.causal else dcp.block_metadata
    (call,) = nodes_of(graph.prologue.graph, *METADATA)
    assert call.target is fused.default
    place = (context.block_size, context.rank, context.dcp_size, context.interleave)
    assert call.args[3:] == place
    names = {body: graph.step_inputs[body] for body in graph.prologue_inputs}
    assert set(names.values()) == {"positions", "block_table", "prefix_lengths"} <= METADATA_INPUTS


@EVERY
def test_the_prologue_computes_what_the_layers_asked_for(deepseek: Captured, context: PassContext) -> None:
    """Its outputs reach the operands that the separate operators fed."""
    graph = hoisted(deepseek, context)
    positions, prefix = torch.tensor([[8, 9, -1], [0, 1, 2]]), torch.tensor([5, 0])
    table = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    inputs = {"positions": positions, "block_table": table, "prefix_lengths": prefix}
    outputs = graph.prologue(*(inputs[graph.step_inputs[node]] for node in graph.prologue_inputs))
    extra = [node for node in graph.graph.find_nodes(op="placeholder") if node.name.startswith("metadata_")]
    found = dict(zip(extra, outputs))
    place = (context.rank, context.dcp_size, context.interleave)
    bounds = (dcp.row_bounds if context.causal else dcp.block_bounds)(positions, *place)
    slots = dcp.cp_local_slot(positions, table, context.block_size, *place)
    for write in nodes_of(graph.graph, dcp.kv_write.default):
        assert torch.equal(found[write.args[3]], slots)
    for call in nodes_of(graph.graph, dcp.mla_rows.default):
        assert torch.equal(found[call.args[4]], dcp.row_requests(positions))
        assert torch.equal(found[call.args[5]], bounds)
    for call in nodes_of(graph.graph, dcp.mla_prefix.default):
        assert torch.equal(found[call.args[4]], dcp.prefix_bounds(prefix, *place))
    for call in nodes_of(graph.graph, dcp.mla_tail.default):
        wanted = dcp.row_requests(positions), dcp.prefix_bounds(prefix, *place), bounds
        assert all(torch.equal(found[operand], value) for operand, value in zip(call.args[4:7], wanted))


@pytest.mark.slow
def test_the_prologue_is_the_same_for_4_and_for_40_layers() -> None:
    censuses = {}
    for layers in (4, 40):
        model = tiny_deepseek_v3(
            layers, first_k_dense_replace=layers, hidden_size=8, intermediate_size=8, q_lora_rank=None, kv_lora_rank=4,
            num_attention_heads=1, num_key_value_heads=1, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4,
        )  # fmt: skip
        graph = capture(model)
        results = run_passes(graph, CONTEXT)
        before = next(result for result in results if result.name == "hoist_metadata").before
        assert before["dcp::row_bounds"] == before["dcp::cp_local_slot"] == layers
        assert nodes_of(graph.graph, *METADATA) == []
        censuses[layers] = census(graph.prologue.graph)
        assert len(nodes_of(graph.graph, dcp.kv_write.default)) == layers
    assert censuses[4] == censuses[40]
    assert censuses[4]["dcp::step_metadata"] == 1


@EVERY
def test_a_second_run_finds_nothing(deepseek: Captured, context: PassContext) -> None:
    graph = hoisted(deepseek, context)
    before = [node.format_node() for part in (graph.graph, graph.prologue.graph) for node in part.nodes]
    (result,) = run_passes(graph, context, HOIST)
    assert result.matches == 0
    assert [node.format_node() for part in (graph.graph, graph.prologue.graph) for node in part.nodes] == before


def test_what_depends_on_hidden_states_stays(deepseek: Captured) -> None:
    """Also where it depends on metadata as well."""
    graph = deepseek.graph()
    run_passes(graph, CONTEXT, PASSES[: PASSES.index(hoist_metadata)])
    (bounds, *_) = nodes_of(graph.graph, dcp.row_bounds.default)
    ids = next(node for node, name in graph.step_inputs.items() if name == "input_ids")
    output = graph.graph.find_nodes(op="output")[0]
    emit = Emitter(graph.graph, like=bounds)
    with graph.graph.inserting_before(output):
        mixed = emit(aten.add.Tensor, emit(aten.sum.default, bounds), emit(aten.sum.default, ids))
    output.args = ((*output.args[0], mixed),)
    hoist_metadata.run(graph, CONTEXT)
    hoist_metadata.check(graph, CONTEXT)
    moved, stayed = mixed.args
    assert mixed.graph is graph.graph and moved.name.startswith("metadata_") and stayed.args == (ids,)


def test_a_computation_on_metadata_moves_and_is_shared(deepseek: Captured) -> None:
    """Equal calls are one, and a size in between moves along."""
    graph = deepseek.graph()
    run_passes(graph, CONTEXT, PASSES[: PASSES.index(hoist_metadata)])
    output = graph.graph.find_nodes(op="output")[0]
    positions = next(node for node, name in graph.step_inputs.items() if name == "positions")
    added = []
    with graph.graph.inserting_before(output):
        for _ in range(2):
            emit = Emitter(graph.graph, like=positions)
            rows = emit(aten.sym_size.int, positions, 1)
            added.append(emit(aten.mul.Tensor, positions, rows))
    output.args = ((*output.args[0], *added),)
    hoist_metadata.run(graph, CONTEXT)
    hoist_metadata.check(graph, CONTEXT)
    first, second = output.args[0][-2:]
    assert first is second and first.op == "placeholder"
    assert census(graph.prologue.graph)["aten::mul.Tensor"] == 1
    inputs = {
        "positions": torch.tensor([[3, 4]]),
        "block_table": torch.tensor([[1]]),
        "prefix_lengths": torch.tensor([0]),
    }
    outputs = graph.prologue(*(inputs[graph.step_inputs[node]] for node in graph.prologue_inputs))
    assert [6, 8] in [value.flatten().tolist() for value in outputs]


# --- graphs broken by hand -------------------------------------------------------------------------------------------


def test_metadata_left_in_the_body_is_caught(deepseek: Captured) -> None:
    graph = hoisted(deepseek, CONTEXT)
    positions = next(node for node, name in graph.step_inputs.items() if name == "positions")
    with graph.graph.inserting_before(graph.attention[0].calls[-1]):
        Emitter(graph.graph, like=positions)(dcp.row_requests.default, positions)
    with pytest.raises(InvariantError, match="hoist_metadata: 1 metadata operators left in the body"):
        hoist_metadata.check(graph, CONTEXT)


def test_a_second_metadata_call_in_the_prologue_is_caught(deepseek: Captured) -> None:
    graph = hoisted(deepseek, CONTEXT)
    (call,) = nodes_of(graph.prologue.graph, *METADATA)
    with graph.prologue.graph.inserting_after(call):
        Emitter(graph.prologue.graph, like=call)(dcp.row_requests.default, call.args[0])
    with pytest.raises(InvariantError, match="2 metadata operators in the prologue, not 1"):
        hoist_metadata.check(graph, CONTEXT)


def test_a_prologue_that_reads_tokens_or_weights_is_caught(deepseek: Captured) -> None:
    for intruder in ("input_ids", "weight"):
        graph = hoisted(deepseek, CONTEXT)
        tokens = next(node for node, name in graph.step_inputs.items() if name == "input_ids")
        graph.prologue_inputs.append(tokens if intruder == "input_ids" else next(iter(graph.constants)))
        with pytest.raises(InvariantError, match="the prologue reads .*, which is not step metadata"):
            hoist_metadata.check(graph, CONTEXT)


def test_values_of_prologue_outputs_are_described(deepseek: Captured) -> None:
    graph = hoisted(deepseek, CONTEXT)
    extra = [node for node in graph.graph.find_nodes(op="placeholder") if node.name.startswith("metadata_")]
    assert len(extra) == 4
    assert {value(node).dtype for node in extra} == {torch.int32, torch.int64}
    assert graph.graph.find_nodes(op="placeholder")[-4:] == extra
