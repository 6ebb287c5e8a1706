# SPDX-License-Identifier: Apache-2.0
"""Products of one input become one: which, in what order, what is left alone, and that every value stays what it was."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, fx, nn

from dcp_compile._compat import Fakes, trace
from dcp_compile.capture import Joined, StepGraph, capture
from dcp_compile.errors import InvariantError
from dcp_compile.lower import join_weights
from dcp_compile.passes import PASSES, cleanup, join_projections, run_passes
from dcp_compile.passes.graph_tools import aten, census, dcp, nodes_of, value
from tests.passes import ranks
from tests.passes.models import CONTEXT, Captured, captured_model, captured_part
from tests.passes.test_pipeline import Talk
from tests.tiny_models import tiny_deepseek_v3, tiny_kimi_k3

JOIN = (join_projections, cleanup)
BEFORE = PASSES[: PASSES.index(join_projections)]


def joined_names(model: nn.Module, graph: StepGraph) -> list[list[str]]:
    """Paths of the parameters of every joined weight, without the layers."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    short = [[names[part] for part in c.parts] for c in graph.constants.values() if isinstance(c, Joined)]
    return [[".".join(name.split(".")[3:]).removesuffix(".weight") for name in parts] for parts in short]


def one_behind_the_other(parts: list[nn.Parameter]) -> bool:
    """In memory, each with a storage of its own."""
    own = all(part.untyped_storage().nbytes() == part.nbytes for part in parts)
    return own and all(two.data_ptr() == one.data_ptr() + one.nbytes for one, two in pairwise(parts))


def under(module: str, *names: str) -> list[str]:
    return [f"{module}.{name}" for name in names]


KDA = under("self_attn", "q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_proj")
DENSE = under("mlp", "gate_proj", "up_proj")
EXPERTS = under(
    "block_sparse_moe", "routed_expert_down_proj", "shared_experts.gate_proj", "shared_experts.up_proj"
)
FOUND = {
    "deepseek": [under("self_attn", "q_a_proj", "kv_a_proj_with_mqa"), DENSE] * 2,
    "kimi_k3": [
        KDA, DENSE, under("self_attn", "q_a_proj", "kv_a_proj_with_mqa", "g_proj"), ["block_sparse_moe.gate", *EXPERTS],
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_the_siblings_of_a_model_are_found_in_its_order(name: str) -> None:
    captured = captured_model(name)
    graph = captured.graph()
    results = {result.name: result for result in run_passes(graph, CONTEXT)}
    assert joined_names(captured.model, graph) == FOUND[name]
    gone = sum(len(names) - 1 for names in FOUND[name])
    result = results["join_projections"]
    assert result.matches == gone == result.before["aten::mm"] - result.after["aten::mm"]
    parts = {part for constant in graph.constants.values() if isinstance(constant, Joined) for part in constant.parts}
    assert not parts & {constant for constant in graph.constants.values() if isinstance(constant, Tensor)}
    inputs = graph.graph.find_nodes(op="placeholder")
    assert list(graph.constants) == [node for node in inputs if node in graph.constants]


def test_a_router_that_is_read_in_another_type_is_left_alone() -> None:
    """In bfloat16 the router's weight is cast first; in float32 that cast is none."""
    model = tiny_kimi_k3(2, dtype=torch.bfloat16)
    graph = capture(model)
    run_passes(graph, CONTEXT)
    assert joined_names(model, graph) == [*FOUND["kimi_k3"][:3], EXPERTS]


def test_windows_are_made_of_the_product_itself() -> None:
    graph = captured_model("kimi_k3").graph()
    results = {result.name: result for result in run_passes(graph, CONTEXT)}
    counts = results["join_projections"]
    assert counts.before["aten::cat"] - counts.after["aten::cat"] == 1
    (window,) = nodes_of(graph.graph, dcp.conv_window.default)
    source, passed = window.args[0], []
    while source.target is not aten.mm.default:
        passed.append(source.target)
        source = source.args[0]
    assert passed == [aten.transpose.int, aten.view.default, aten.slice.Tensor]
    assert value(source).shape[1] == sum(captured_model("kimi_k3").model.get_parameter(
        f"model.layers.0.{name}.weight").shape[0] for name in KDA)  # fmt: skip


def test_parts_of_a_model_that_was_loaded_whole_stay_where_they_are() -> None:
    """What was cut from a weight is a view of it, and the whole is needed again: only whole weights are joined."""
    part = captured_part(0)
    graph = part.graph()
    run_passes(graph, dataclasses.replace(CONTEXT, dcp_size=2, group="ranks", heads_sharded=True))
    assert joined_names(part.model, graph) == [
        under("self_attn", "q_a_proj", "kv_a_proj_with_mqa"),
        under("block_sparse_moe", "gate", "routed_expert_down_proj"),
    ]


def test_running_again_changes_nothing(captured: Captured) -> None:
    graph = captured.graph()
    run_passes(graph, CONTEXT)
    for again in (lambda: None, lambda: join_weights(graph)):
        again()
        before = [node.format_node() for node in graph.graph.nodes]
        assert [result.matches for result in run_passes(graph, CONTEXT, JOIN)] == [0, 0]
        assert [node.format_node() for node in graph.graph.nodes] == before


def test_the_pass_takes_no_number_of_rows_for_granted(captured: Captured) -> None:
    graph = captured.graph()
    run_passes(graph, CONTEXT, BEFORE)
    shapes = value(next(iter(graph.step_inputs))).fake_mode.shape_env
    known = len(shapes.guards), dict(shapes.replacements)
    join_projections.run(graph, CONTEXT)
    assert (len(shapes.guards), dict(shapes.replacements)) == known


class Layouts(ranks.Rank):
    """Compares shape and strides of everything that is computed with its fake value."""

    checked = 0

    def run_node(self, node: fx.Node):
        found = super().run_node(node)
        if node.op == "placeholder":
            self.sizes = getattr(self, "sizes", {})
            for size, real in zip(getattr(value(node), "shape", ()), getattr(found, "shape", ())):
                if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                    self.sizes[size.node.expr] = real
        elif isinstance(found, Tensor):
            wanted = value(node)
            assert tuple(found.shape) == self.numbers(wanted.shape), node.format_node()
            strides = zip(found.shape, found.stride(), self.numbers(wanted.stride()))
            assert all(one == other for size, one, other in strides if size > 1), node.format_node()
            Layouts.checked += 1
        return found

    def numbers(self, sizes) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else int(size.node.expr.subs(self.sizes)) for size in sizes)


def test_all_values_have_the_layout_that_their_nodes_say(captured: Captured, monkeypatch) -> None:
    monkeypatch.setattr(ranks, "Rank", Layouts)
    Layouts.checked = 0
    talk = Talk(captured, ranks.Group([captured.original], CONTEXT, 3, longest=24), 3)
    talk.step([5, 1, 0], at_end=True)
    talk.step([1, 1, 1])
    talk.verify([4, 3, 2], keep=[2, 0, 2])
    assert Layouts.checked > 200


# --- functions of a few weights --------------------------------------------------------------------------------------


class Small:
    """A function of ``x [T, width]`` and weights as a graph with T symbolic, and what it computes."""

    def __init__(self, function: Callable[..., Tensor], x: Tensor, *weights: Tensor):
        fakes = Fakes()
        rows = fakes.symbolic(torch.zeros(7, dtype=torch.int64)).shape[0]
        with fakes.mode:
            fake = torch.empty(rows, x.shape[1], dtype=x.dtype)
        self.function, self.x, self.weights = function, x, weights
        inputs = [fake, *(fakes.static(weight.detach()) for weight in weights)]
        with torch.no_grad():
            module = trace(lambda *inputs: self.results(*inputs), inputs, fakes)
        held = dict(zip(module.graph.find_nodes(op="placeholder")[1:], weights))
        self.graph = StepGraph(module, {}, {}, held, ("out",), "Small")

    def results(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        results = self.function(*inputs)
        return results if isinstance(results, tuple) else (results,)

    def matches(self) -> int:
        """Of the pass; the graph must go on to compute what the function does."""
        (result, _) = run_passes(self.graph, CONTEXT, JOIN)
        join_weights(self.graph)
        with torch.no_grad():
            found = fx.Interpreter(self.graph.module).run(self.x, *self.graph.constants.values())
            wanted = self.results(self.x, *self.weights)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        return result.matches

    def targets(self) -> dict[str, int]:
        return census(self.graph.graph)


def weights(*rows: int, width: int = 6, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(count, width, dtype=dtype)) for count in rows]


def linear(x: Tensor, *matrices: Tensor) -> list[Tensor]:
    return [nn.functional.linear(x[:, None], matrix) for matrix in matrices]


X = torch.randn(5, 6)


def test_any_sizes() -> None:
    generator = random.Random(seed := random.randrange(2**31))
    print(f"seed {seed}")
    for _ in range(12):
        count, width = generator.randint(2, 6), generator.randint(1, 40)
        dtype = generator.choice([torch.float32, torch.float64])
        sizes = [generator.randint(1, 33) for _ in range(count)]
        matrices = weights(*sizes, width=width, dtype=dtype)
        order = generator.sample(range(count), count)
        together = generator.randint(1, count)

        def function(x: Tensor, *matrices: Tensor, first=order[:together], last=order[together:]) -> Tensor:
            results = linear(x, *matrices)
            out = torch.cat([results[index] for index in first], dim=-1)
            return torch.cat([out.sin(), *(results[index].exp() for index in last)], dim=-1)[:, 0]

        small = Small(function, torch.randn(generator.choice([0, 1, 4, 9]), width, dtype=dtype), *matrices)
        before = small.targets()["aten::mm"]
        assert before == count
        assert small.matches() == count - 1 and small.targets()["aten::mm"] == 1
        # one copy makes the result; the other one was all slices side by side
        assert small.targets().get("aten::cat", 0) == 1
        assert one_behind_the_other(sorted(matrices, key=Tensor.data_ptr))


def test_what_lies_side_by_side_decides_the_order() -> None:
    def function(x, a, b, c, d):
        one, two, three, four = linear(x, a, b, c, d)
        return torch.cat([four, two], -1).sin().sum(-1) + torch.cat([two, three], -1).cos().sum(-1) + one.sum(-1)

    small = Small(function, X, *(matrices := weights(3, 4, 5, 6)))
    run_passes(small.graph, CONTEXT, JOIN)
    (constant,) = small.graph.constants.values()
    assert list(map(id, constant.parts)) == [id(matrices[index]) for index in (3, 1, 0, 2)]
    assert small.targets()["aten::cat"] == 1  # [two, three] cannot be had as well


def test_results_of_joined_products_may_be_inputs_of_others() -> None:
    def function(x, a, b, c, d):
        one, two = linear(x, a, b)
        both = torch.cat([one, two], -1)[:, 0]
        more = torch.cat([one, two], -1)[:, 0]
        return (both @ c.t()).sin() + (more @ d.t()).cos()

    assert Small(function, X, *weights(3, 4), *weights(5, 5, width=7)).matches() == 2


LEFT = {
    "one": (lambda x, a: (x @ a.t()).sin(), weights(3)),
    "other inputs": (lambda x, a, b: (x @ a.t()).sin() + (x.exp() @ b.t()).sin(), weights(3, 3)),
    "other order": (lambda x, a, b: (x @ a.t()) * (x.flip(0) @ b.t()), weights(3, 3)),
    "weights used twice": (lambda x, a, b: (x @ a.t()).sin() + (x @ b.t()).sin() + b.sum(), weights(3, 3)),
    "one weight twice": (lambda x, a: (x @ a.t()).sin() + (x @ a.t()).cos(), weights(3)),
    "made weights": (lambda x, a, b: (x @ a.exp().t()).sin() + (x @ b.t()).sin(), weights(3, 3)),
    "other types": (
        lambda x, a, b: (x @ a.float().t()).sin() + (x @ b.t()).sin(),
        [nn.Parameter(torch.randn(3, 6, dtype=torch.bfloat16)), *weights(3)],
    ),
    "columns": (lambda x, a, b: (x @ a).sin() + (x @ b).sin(), weights(6, 6, width=3)),
    "buffers": (lambda x, a, b: (x @ a.t()).sin() + (x @ b.t()).sin(), [torch.randn(3, 6), torch.randn(3, 6)]),
    "biases": (
        lambda x, a, b, bias: nn.functional.linear(x, a, bias).sin() + (x @ b.t()).sin(),
        [*weights(3, 3), nn.Parameter(torch.randn(3))],
    ),
    "transposed weights": (
        lambda x, a, b: (x @ a.t()).sin() + (x @ b.t()).sin(),
        [nn.Parameter(torch.randn(6, 3).t()), *weights(3)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone(name: str) -> None:
    function, matrices = LEFT[name]
    before = [matrix.data_ptr() for matrix in matrices]
    small = Small(function, X, *matrices)
    count = small.targets()["aten::mm"]
    assert small.matches() == 0 and small.targets()["aten::mm"] == count
    assert [matrix.data_ptr() for matrix in matrices] == before


def test_weights_whose_memory_others_hold_are_left_alone() -> None:
    def function(x, a, b, c, d):
        return sum(result.sin() for result in linear(x, a, b, c)) + d.sum()

    whole = torch.randn(9, 6)
    views = [nn.Parameter(whole[start : start + 3]) for start in (0, 6)]
    tied = nn.Parameter(torch.randn(3, 6))
    assert Small(function, X, *views, *weights(3), *weights(2)).matches() == 0  # of the three, one may be moved
    assert Small(function, X, tied, *weights(3, 3), nn.Parameter(tied.data)).matches() == 1
    with torch.inference_mode():
        frozen = weights(3)
    assert Small(function, X, *weights(3, 3), *frozen, *weights(2)).matches() == 1


def test_weights_that_were_joined_are_joined_again_alone_or_with_others() -> None:
    def two(x, a, b):
        return (x @ a.t()).sin() + (x @ b.t()).sin()

    def three(x, a, b, c):
        return two(x, a, b) + (x @ c.t()).sin()

    a, b, c = weights(3, 3, 3)
    first = Small(two, X, a, b)
    assert first.matches() == 1 and one_behind_the_other([a, b])
    where = a.data_ptr(), b.data_ptr()
    assert Small(two, X, a, b).matches() == 1 and (a.data_ptr(), b.data_ptr()) == where  # some program reads them there
    assert Small(three, X, a, b, c).matches() == 2 and one_behind_the_other([a, b, c])
    assert Small(two, X, a, c).matches() == 1 and one_behind_the_other([a, c])


def test_parts_of_a_whole_are_left_alone() -> None:
    whole = torch.randn(9, 6)
    views = [nn.Parameter(whole[start : start + 3]) for start in (3, 6)]
    small = Small(lambda x, a, b: (x @ a.t()).sin() + (x @ b.t()).sin(), X, *views)
    assert small.matches() == 0 and views[0].data_ptr() == whole[3:].data_ptr()


def test_weights_of_no_rows_and_weights_of_several_processes_are_left_alone() -> None:
    def function(x, a, b, c, d):
        return sum(result.sin().sum(-1) for result in linear(x, a, b, c, d))

    *matrices, shared = weights(3, 0, 4, 5)
    shared.share_memory_()
    where = shared.data_ptr()
    assert Small(function, X, *matrices, shared).matches() == 1
    assert shared.is_shared() and shared.data_ptr() == where


def test_a_result_that_must_be_dense_keeps_its_product() -> None:
    def function(x, a, b, c):
        return (x @ a.t()).view(-1).sin().sum() + (x @ b.t()).sin().sum() + (x @ c.t()).cos().sum()

    small = Small(function, X, *(matrices := weights(3, 4, 5)))
    assert small.matches() == 1 and small.targets()["aten::mm"] == 2
    assert one_behind_the_other(matrices[1:])


def test_outputs_keep_their_products() -> None:
    """A slice would give the output other strides."""
    small = Small(lambda x, a, b, c: (x @ a.t(), (x @ b.t()).sin(), (x @ c.t()).sin()), X, *weights(3, 3, 3))
    assert small.matches() == 1
    small = Small(lambda x, a, b: ((x @ a.t())[:, None], (x @ b.t()).sin()), X, *weights(3, 3))
    assert small.matches() == 0


def test_operators_of_others_get_dense_operands() -> None:
    """Collectives take nothing else."""
    def function(x, a, b, c):
        summed = torch.ops._c10d_functional.all_reduce(x @ a.t(), "sum", "ranks")
        return torch.ops._c10d_functional.wait_tensor(summed).sin() + (x @ b.t()).sin() + (x @ c.t()).cos()

    small = Small(function, X, *weights(3, 3, 3))
    run_passes(small.graph, CONTEXT, JOIN)
    assert small.targets()["aten::mm"] == 2
    (reduced,) = nodes_of(small.graph.graph, torch.ops._c10d_functional.all_reduce.default)
    assert reduced.args[0].target is aten.mm.default


# --- graphs broken by hand -------------------------------------------------------------------------------------------


def test_products_that_were_left_are_caught() -> None:
    graph = captured_model("deepseek").graph()
    run_passes(graph, CONTEXT, BEFORE)
    with pytest.raises(InvariantError, match=r"join_projections: products of one input left: \[\['mm', 'mm_2'\], "):
        join_projections.check(graph, CONTEXT)


def test_a_weight_of_another_size_than_its_parts_is_caught() -> None:
    graph = captured_model("deepseek").graph()
    run_passes(graph, CONTEXT)
    node, constant = next((n, c) for n, c in graph.constants.items() if isinstance(c, Joined))
    graph.constants[node] = Joined(constant.parts[:1])
    with pytest.raises(InvariantError, match=rf"join_projections: {node.name} is \(64, 64\), its parts are \(24, 64\)"):
        join_projections.check(graph, CONTEXT)


def test_biases_of_a_model() -> None:
    model = tiny_deepseek_v3(1, first_k_dense_replace=1, attention_bias=True)
    graph = capture(model)
    run_passes(graph, CONTEXT)
    assert joined_names(model, graph) == [DENSE]
