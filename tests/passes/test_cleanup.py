# SPDX-License-Identifier: Apache-2.0
"""Dead code, and views that change nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from dcp_compile._compat import Fakes, trace
from dcp_compile.capture import StepGraph
from dcp_compile.errors import InvariantError
from dcp_compile.passes import PASSES, cleanup, run_passes
from dcp_compile.passes.graph_tools import aten, census, dcp, nodes_of
from tests.passes.models import CONTEXT, Captured

CLEAN = (cleanup,)


def small(function: Callable[..., Tensor], *inputs: Tensor) -> StepGraph:
    """The graph of a function of a few tensors, without layers."""
    fakes = Fakes()
    module = trace(lambda *x: (function(*x),), [fakes.static(x) for x in inputs], fakes)
    placeholders = module.graph.find_nodes(op="placeholder")
    return StepGraph(module, {}, {}, dict(zip(placeholders, inputs)), ("out",), "Small")


def run_graph(graph: StepGraph) -> Tensor:
    graph.module.recompile()
    return fx.Interpreter(graph.module).run(*graph.constants.values())[0]


def cleaned(function: Callable[..., Tensor], *inputs: Tensor) -> StepGraph:
    """The graph after the pass, which must still compute the same, and be stable."""
    graph = small(function, *inputs)
    run_passes(graph, CONTEXT, CLEAN)
    assert torch.equal(run_graph(graph), function(*inputs))
    before = [node.format_node() for node in graph.graph.nodes]
    (again,) = run_passes(graph, CONTEXT, CLEAN)
    assert again.matches == 0 and [node.format_node() for node in graph.graph.nodes] == before
    return graph


A, B = torch.arange(6.0).view(2, 3), torch.arange(10.0, 18.0).view(2, 4)


def test_views_that_change_nothing_go() -> None:
    graph = cleaned(lambda a, b: a.view(2, 3).reshape(2, 3).view(2, -1) * 2, A, B)
    assert census(graph.graph) == {"aten::mul.Tensor": 1}


def test_views_that_change_something_stay() -> None:
    assert census(cleaned(lambda a, b: a.view(3, 2) * 2, A, B).graph)["aten::view"] == 1
    assert census(cleaned(lambda a, b: a.view(torch.int32) * 2, A, B).graph)["aten::view.dtype"] == 1


def test_unused_nodes_go_and_unused_inputs_stay() -> None:
    graph = small(lambda a, b: a * 2, A, B)
    with graph.graph.inserting_before(graph.graph.find_nodes(op="output")[0]):
        dead = graph.graph.call_function(aten.neg.default, (next(iter(graph.constants)),))
    dead.meta["val"] = next(iter(graph.constants)).meta["val"]
    (result,) = run_passes(graph, CONTEXT, CLEAN)
    assert result.matches == 1
    assert len(graph.graph.find_nodes(op="placeholder")) == 2 and census(graph.graph) == {"aten::mul.Tensor": 1}


def test_a_real_graph_keeps_its_writes(captured: Captured) -> None:
    graph = captured.graph()
    run_passes(graph, CONTEXT, PASSES[:-1])
    writes = {"dcp::kv_write", "dcp::kda", "dcp::conv_window"}
    before = census(graph.graph)
    run_passes(graph, CONTEXT, CLEAN)
    after = census(graph.graph)
    assert {name: before[name] for name in writes} == {name: after[name] for name in writes}
    assert all(node.users or node.is_impure() for node in graph.graph.nodes if node.op == "call_function")


# --- graphs broken by hand -------------------------------------------------------------------------------------------


def test_an_unused_node_is_caught(deepseek: Captured) -> None:
    graph = deepseek.graph()
    run_passes(graph, CONTEXT)
    weight = next(iter(graph.constants))
    with graph.graph.inserting_before(graph.graph.find_nodes(op="output")[0]):
        graph.graph.call_function(aten.neg.default, (weight,)).meta["val"] = weight.meta["val"]
    with pytest.raises(InvariantError, match="cleanup: unused nodes left: .*neg"):
        cleanup.check(graph, CONTEXT)


def test_a_dropped_write_is_caught(deepseek: Captured) -> None:
    graph = deepseek.graph()
    run_passes(graph, CONTEXT)
    graph.graph.erase_node(nodes_of(graph.graph, dcp.kv_write.default)[0])
    graph.graph.eliminate_dead_code()
    with pytest.raises(InvariantError, match="cleanup: a cache write was dropped"):
        cleanup.check(graph, CONTEXT)
