# SPDX-License-Identifier: Apache-2.0
"""The rewritten graphs against the model itself, on one rank and several; and the checks between passes."""

from __future__ import annotations

import dataclasses
from types import ModuleType, SimpleNamespace

import pytest
import torch

from dcp_compile.errors import InvariantError
from dcp_compile.lower import allocate_states
from dcp_compile.passes import PASSES, PassResult, run_passes
from dcp_compile.passes.fingerprint import graph_fingerprint
from dcp_compile.passes.graph_tools import METADATA, aten, dcp, nodes_of
from tests.passes.models import CONTEXT, HYBRID, Captured, captured_model
from tests.passes.ranks import Group, sharded_by_heads
from tests.tiny_models import VOCAB


def reference(model, tokens: list[int]) -> torch.Tensor:
    """The model's own logits ``[tokens, V]`` for a whole sequence."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


class Talk:
    """Requests that a group processes, and the token lists that the model itself is given."""

    def __init__(self, captured: Captured, group: Group, requests: int):
        self.model, self.group = captured.model, group
        self.generator = torch.Generator().manual_seed(requests)
        self.texts: list[list[int]] = [[] for _ in range(requests)]
        self.tolerance = 1e-10 if captured.original.graph.find_nodes(op="output")[0].args[0][0].meta["val"].dtype == (
            torch.float64) else 2e-4  # fmt: skip

    def step(self, counts: list[int], verify: bool = False, at_end: bool = False) -> torch.Tensor:
        """New random tokens, ``counts[b]`` for each request; every logit is compared. Returns the tokens."""
        rows = max(counts)
        tokens = torch.randint(3, VOCAB, (len(counts), rows), generator=self.generator)
        logits = self.group.run(tokens, counts, verify, at_end)
        for request, count in enumerate(counts):
            if not count:
                continue
            mine = slice(rows - count, None) if at_end else slice(0, count)
            text = self.texts[request] + tokens[request, mine].tolist()
            wanted = reference(self.model, text)[-count:]
            torch.testing.assert_close(logits[request, mine], wanted, rtol=self.tolerance, atol=self.tolerance)
            if not verify:
                self.texts[request] = text
        return tokens

    def verify(self, counts: list[int], keep: list[int]) -> None:
        tokens = self.step(counts, verify=True)
        self.group.keep(keep)
        for request, count in enumerate(keep):
            self.texts[request] += tokens[request, :count].tolist()


def converse(captured: Captured, graphs: list, **settings) -> None:
    """A ragged prefill in two chunks, plain steps, and verify steps that keep all, some or none of their tokens."""
    requests = 3
    group = Group(graphs, dataclasses.replace(CONTEXT, **settings), requests, longest=24)
    talk = Talk(captured, group, requests)
    talk.step([5, 1, 0], at_end=True)
    talk.step([4, 4, 3], at_end=True)
    talk.step([1, 1, 0])
    talk.verify([4, 3, 2], keep=[2, 0, 2])
    talk.verify([3, 4, 0], keep=[3, 1, 0])
    talk.verify([1, 1, 1], keep=[1, 1, 1])
    talk.verify([2, 0, 4], keep=[0, 0, 3])


@pytest.mark.parametrize("layout, ranks", [("flattened", 1), ("split", 3)])
def test_logits_are_the_models_own(captured: Captured, layout: str, ranks: int) -> None:
    converse(captured, [captured.original] * ranks, layout=layout, interleave=2 if ranks > 1 else 1)


@pytest.mark.parametrize("layout, ranks", [("split", 1), ("flattened", 2)])
def test_the_layouts_do_not_depend_on_the_number_of_ranks(hybrid: Captured, layout: str, ranks: int) -> None:
    converse(hybrid, [hybrid.original] * ranks, layout=layout)


def test_heads_over_ranks_give_the_models_own_logits() -> None:
    captured = captured_model("expanded")
    graphs = sharded_by_heads(captured.model, 2)
    for layout in ("split", "flattened"):
        converse(captured, graphs, heads_sharded=True, layout=layout)


def test_a_second_run_of_the_whole_pipeline_changes_nothing(captured: Captured) -> None:
    context = dataclasses.replace(CONTEXT, dcp_size=2, group="ranks")
    graph = captured.graph()
    first = run_passes(graph, context)
    assert [result.name for result in first] == [module.__name__.rpartition(".")[2] for module in PASSES]
    before = [[node.format_node() for node in part.nodes] for part in (graph.graph, graph.prologue.graph)]
    second = run_passes(graph, context)
    assert [result.matches for result in second] == [0] * len(PASSES)
    assert [[node.format_node() for node in part.nodes] for part in (graph.graph, graph.prologue.graph)] == before
    for result in second:
        assert result.before == result.after == second[0].before


def test_records_follow_on_from_one_another(captured: Captured) -> None:
    results = run_passes(captured.graph(), CONTEXT)
    for one, other in zip(results, results[1:]):
        assert one.after == other.before
    by_name = {result.name: result for result in results}
    layers = len(captured.mla_layers)
    assert by_name["match_mla"].matches == by_name["absorb_mla"].matches == by_name["insert_kv_write"].matches == layers
    assert by_name["shard_dcp"].matches == 0
    assert by_name["lower_kda"].matches == (2 if captured.name in HYBRID else 0)
    assert by_name["insert_kv_write"].after["dcp::kv_write"] == layers
    assert all(result.seconds >= 0 for result in results)


def test_the_copy_that_was_rewritten_leaves_the_original_alone(deepseek: Captured) -> None:
    before = [node.format_node() for node in deepseek.original.graph.nodes]
    shapes = {node: str(node.meta["val"].shape) for node in deepseek.original.states}
    run_passes(deepseek.graph(), CONTEXT)
    assert [node.format_node() for node in deepseek.original.graph.nodes] == before
    assert {node: str(node.meta["val"].shape) for node in deepseek.original.states} == shapes


# --- ranks -----------------------------------------------------------------------------------------------------------


def fingerprint(captured: Captured, **settings) -> str:
    graph = captured.graph()
    run_passes(graph, dataclasses.replace(CONTEXT, **settings))
    return graph_fingerprint(graph)


def test_all_ranks_have_one_fingerprint_and_other_graphs_another(deepseek: Captured) -> None:
    ranks = [fingerprint(deepseek, dcp_size=3, rank=rank, group="ranks") for rank in (0, 2)]
    assert len(set(ranks)) == 1
    others = [
        fingerprint(deepseek, dcp_size=3, group="ranks", layout="flattened"),
        fingerprint(deepseek, dcp_size=2, group="ranks"),
        fingerprint(deepseek, dcp_size=3, group="ranks", interleave=2),
        fingerprint(deepseek, dcp_size=3, group="ranks", block_size=8),
    ]
    assert len({*ranks, *others}) == 1 + len(others)


# --- checks after every pass -----------------------------------------------------------------------------------------


def broken_pass(change) -> ModuleType:
    """A pass that changes the graph and whose own check is content."""

    def run(graph, context) -> PassResult:
        change(graph)
        return PassResult("broken", 1)

    return SimpleNamespace(run=run, check=lambda graph, context: None)


def add_call(graph, target, *arguments, with_value: bool):
    with graph.graph.inserting_before(graph.graph.find_nodes(op="output")[0]):
        node = graph.graph.call_function(target, arguments)
    if with_value:
        node.meta["val"] = arguments[0].meta["val"]


def test_a_node_without_a_fake_value_is_caught(deepseek: Captured) -> None:
    def change(graph) -> None:
        add_call(graph, aten.neg.default, next(iter(graph.constants)), with_value=False)

    with pytest.raises(InvariantError, match="broken: node neg.* has no fake value"):
        run_passes(deepseek.graph(), CONTEXT, (broken_pass(change),))


def test_an_unknown_write_is_caught(deepseek: Captured) -> None:
    def change(graph) -> None:
        weight = next(iter(graph.constants))
        add_call(graph, aten.copy_.default, weight, weight, with_value=True)

    with pytest.raises(InvariantError, match="broken: node copy_.* writes into a graph input"):
        run_passes(deepseek.graph(), CONTEXT, (broken_pass(change),))


@pytest.mark.parametrize("change", [
    lambda value: value.to(torch.float32), lambda value: value[:, :-1], lambda value: value.t().contiguous().t()
], ids=["dtype", "shape", "stride"])  # fmt: skip
def test_an_output_of_another_kind_is_caught(deepseek: Captured, change) -> None:
    def other_output(graph) -> None:
        node = graph.graph.find_nodes(op="output")[0].args[0][0]
        with node.meta["val"].fake_mode:
            node.meta["val"] = change(node.meta["val"])

    with pytest.raises(InvariantError, match="broken: outputs changed from"):
        run_passes(deepseek.graph(), CONTEXT, (broken_pass(other_output),))


def test_a_graph_out_of_order_is_caught(deepseek: Captured) -> None:
    def change(graph) -> None:
        first = next(node for node in graph.graph.nodes if node.op == "call_function" and node.users)
        graph.graph.find_nodes(op="output")[0].prepend(first)

    with pytest.raises(RuntimeError, match="used before it has been defined"):
        run_passes(deepseek.graph(), CONTEXT, (broken_pass(change),))


def test_metadata_is_named_once_per_kind(deepseek: Captured) -> None:
    graph = deepseek.graph()
    run_passes(graph, CONTEXT)
    assert nodes_of(graph.graph, *METADATA) == []
    assert [node.target for node in nodes_of(graph.prologue.graph, *METADATA)] == [dcp.step_metadata.default]


@pytest.mark.parametrize("layout, reads", [("split", [dcp.mla_prefix, dcp.mla_tail]), ("flattened", [dcp.mla_rows])])
@pytest.mark.parametrize("dcp_size", [1, 2])
def test_a_float8_cache_is_written_and_read_by_one_scale(deepseek: Captured, layout, reads, dcp_size: int) -> None:
    """The scale is a constant of the graph, and the caches that will be allocated are described as float8."""
    graph = deepseek.graph()
    context = dataclasses.replace(
        CONTEXT, layout=layout, dcp_size=dcp_size, group="ranks" if dcp_size > 1 else None,
        kv_dtype=torch.float8_e4m3fn, kv_scale=0.25,
    )  # fmt: skip
    run_passes(graph, context, PASSES)
    for operator in (dcp.kv_write, *reads):
        calls = nodes_of(graph.graph, operator.default)
        assert len(calls) == len(graph.sites) and {call.args[-1] for call in calls} == {0.25}
    assert {state.dtype for ref, state in allocate_states([graph]).items() if ref.kind == "kv_cache"} == {
        torch.float8_e4m3fn
    }
