# SPDX-License-Identifier: Apache-2.0
"""Bodies cut into regions: what is compiled once, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from dcp_compile import DCPConfig, _compat
from dcp_compile.capture import capture
from dcp_compile.compiler import compile_graph
from dcp_compile.parallel import ParallelLayout
from dcp_compile.passes.graph_tools import nodes_of
from dcp_compile.regions import Body, RegionCompiler
from tests.tiny_models import VOCAB, tiny_deepseek_v3, tiny_kimi_k3, tiny_kimi_linear

dcp, aten = torch.ops.dcp, torch.ops.aten
ROWS, WIDTH, SLOTS = 5, 4, 12
CONFIG = DCPConfig(block_size=4, max_batch_size=3, max_seq_len=24, prefill_chunk=6, num_speculative_tokens=2)


def body(function: Callable, *fixed: tuple[int, ...], rows: int = ROWS) -> fx.GraphModule:
    """The graph of ``function(x [T, WIDTH], slots [T], *fixed)``, T symbolic."""
    fakes = _compat.Fakes()
    inputs = [fakes.symbolic(torch.zeros(rows, WIDTH)), fakes.symbolic(torch.zeros(rows, dtype=torch.int64))]
    inputs[0] = fakes.mode.from_tensor(torch.zeros(1)).new_empty(inputs[1].shape[0], WIDTH)
    inputs += [fakes.static(torch.zeros(shape)) for shape in fixed]
    with fakes.mode:
        return _compat.make_fx(function)(*inputs)


def arguments(rows: int, *fixed: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    tensors = [torch.randn(shape, generator=generator) for shape in ((rows, WIDTH), *fixed)]
    return [tensors[0], torch.arange(rows), *tensors[1:]]


class Uncompiled:
    """In place of a compiler: keeps the graphs it is given and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.ran: list[int] = []

    def __call__(self, module: fx.GraphModule, inputs: list) -> Callable:
        number = len(self.graphs)
        assert len(inputs) == len(module.graph.find_nodes(op="placeholder"))
        self.graphs.append(module)

        def run(*values):
            self.ran.append(number)
            return module(*values)

        return run


def check(function: Callable, *fixed: tuple[int, ...], rows: tuple[int, ...] = (1, 3, ROWS)) -> Uncompiled:
    """The graph of ``function`` in regions gives the same results and the same writes to the bit."""
    module = body(function, *fixed)
    compiler = Uncompiled()
    split = RegionCompiler(compiler)(module)
    for count in rows:
        plain, regional = arguments(count, *fixed), arguments(count, *fixed)
        for wanted, found in zip(module(*plain), split(*regional)):
            assert torch.equal(found, wanted) and found.stride() == wanted.stride()
        assert all(map(torch.equal, regional, plain))
    return compiler


def write(x: Tensor, cache: Tensor, slots: Tensor) -> None:
    dcp.kv_write(x[:, :2], x[:, 2:], cache, slots)


CACHE = (SLOTS // 2, 2, WIDTH)


def merged(x: Tensor) -> Tensor:
    """``x`` through an operator that returns a pair."""
    out, lse = dcp.merge_partials(x[None, :, None], x[None, :, :1])
    return out[:, 0] + lse


def test_equal_regions_are_compiled_once() -> None:
    def layers(x, slots, *weights):
        for weight in weights:
            x = merged(torch.tanh(x @ weight) + 1)
        return (x,)

    compiler = check(layers, *[(WIDTH, WIDTH)] * 4)
    before, after = range(2)  # of the operator; joined they would not be equal in all layers
    assert compiler.ran == 3 * 4 * [before, after]


def test_regions_that_differ_in_anything_are_compiled_apart() -> None:
    def layers(x, slots, *weights):
        x = merged(x + 1.0)
        x = merged(x + 2.0)  # another constant
        x = merged(x * 2.0)  # another operator
        x = merged((x + 1.0).to(torch.float64)).float()  # another type
        x = merged(x + x.sum(1, keepdim=True))  # the input used twice
        x = merged(x[:, :2].repeat(1, 2) + weights[0])  # more inputs
        return (x,)

    compiler = check(layers, (WIDTH,))
    assert len(compiler.graphs) == 7 and len(compiler.ran) == 3 * 7


def test_a_compiler_shared_by_two_bodies_compiles_their_common_regions_once() -> None:
    module = body(lambda x, slots, weight: (merged(torch.tanh(x @ weight)),), (WIDTH, WIDTH))
    compiler = Uncompiled()
    regions = RegionCompiler(compiler)
    one, other = regions(module), regions(module)
    assert (regions.regions, len(regions.compiled), len(compiler.graphs)) == (4, 2, 2)
    inputs = arguments(3, (WIDTH, WIDTH))
    assert torch.equal(one(*inputs)[0], other(*inputs)[0])


def test_a_state_is_read_as_it_was_before_and_after_a_write() -> None:
    def step(x, slots, cache):
        before = cache.sum((0, 1)) + x
        write(before * 2, cache, slots)
        after = cache.view(SLOTS, WIDTH)[:1] + before
        write(after, cache, slots)
        return before, after, cache.view(-1)[:3] + 1

    check(step, CACHE)


def test_views_are_taken_where_they_are_used_and_never_leave_a_region() -> None:
    def step(x, slots, weight):
        both = weight.view(2, WIDTH, WIDTH)
        wide = (x @ both[0]).unsqueeze(1).expand(-1, 2, -1)
        y = merged(wide[:, 1] + 1)
        halves = (y @ both[1]).split([1, 3], 1)
        z = merged(torch.cat([halves[1], halves[0]], 1).t().contiguous().t())
        return z + halves[0], wide.transpose(0, 1)

    compiler = check(step, (2 * WIDTH, WIDTH))
    for module in compiler.graphs:
        returned = {node.target for node in module.graph.output_node().args[0]}
        assert not returned & {aten.view.default, aten.t.default, aten.expand.default, aten.slice.Tensor}


def test_a_result_may_be_used_much_later() -> None:
    def step(x, slots, weight):
        early = torch.tanh(x)
        y = early
        for _ in range(3):
            y = merged(y @ weight)
        return (y + early,)

    check(step, (WIDTH, WIDTH))


def test_sizes_follow_the_rows() -> None:
    def step(x, slots):
        flat = x.reshape(-1)  # T * WIDTH elements: no size of it is T
        y = merged(flat.view(x.shape[0], WIDTH) + torch.arange(x.shape[0])[:, None])
        doubled = torch.cat([y, y]).view(-1) * 2
        dcp.kv_write(y[:, :2], y[:, 2:], torch.zeros(CACHE), slots)
        return doubled.sort().values, torch.ones(2 * y.shape[0])

    check(step, rows=(1, 2, 7))


def test_a_size_that_no_input_shows_comes_with_another_input() -> None:
    def step(x, slots):
        doubled = torch.cat([x, x])  # [2T, WIDTH]
        lse = dcp.merge_partials(doubled[None, :, None], doubled[None, :, :1])[1]  # [2T, 1]
        return (torch.tanh(lse) + 1,)

    module = body(step)
    last = Body(module.graph).regions()[-1]
    assert {node.op for node in last.inputs} == {"call_function", "placeholder"}
    check(step)


def test_operators_side_by_side_leave_no_region_between_them() -> None:
    def step(x, slots, cache):
        write(x, cache, slots)
        write(x, cache, slots)
        return (x.view(-1),)

    compiler = check(step, CACHE)
    assert compiler.graphs == []


def test_a_region_that_nobody_reads_is_not_compiled() -> None:
    def step(x, slots, cache):
        write(x + 1, cache, slots)
        return ()

    module = body(step, CACHE)
    unread = next(iter(nodes_of(module.graph, aten.add.Tensor)))
    with module.graph.inserting_after(unread):
        dead = module.graph.call_function(aten.exp.default, (unread,))
    dead.meta["val"] = unread.meta["val"]
    written = nodes_of(module.graph, dcp.kv_write.default)[0]
    with module.graph.inserting_after(written):
        alone = module.graph.call_function(aten.exp.default, (dead,))
    alone.meta["val"] = unread.meta["val"]
    compiler = Uncompiled()
    regions = RegionCompiler(compiler)
    split = regions(module)
    assert regions.regions == 1 and len(compiler.graphs) == 1
    cache = torch.zeros(CACHE)
    split(torch.ones(2, WIDTH), torch.arange(2), cache)
    assert torch.equal(cache.view(SLOTS, WIDTH)[:3], torch.tensor([2.0, 2.0, 0.0])[:, None].expand(-1, WIDTH))


def test_constants_of_the_graph_and_results_that_are_taken_out_later() -> None:
    def step(x, slots, weight):
        values, order = (x + torch.tensor(2.5)).sort()
        y = values @ weight
        return merged(y), order

    check(step, (WIDTH, WIDTH))


def test_inductor_runs_regions_for_any_number_of_rows() -> None:
    def step(x, slots, cache, *weights):
        for weight in weights:
            x = merged(torch.softmax(x @ weight, -1) + x)
            write(x, cache, slots)
        return x, x.t()

    fixed = (CACHE, *[(WIDTH, WIDTH)] * 4)
    module = body(step, *fixed)
    regions = RegionCompiler(_compat.compile_graph)
    split = regions(module)
    assert (regions.regions, len(regions.compiled)) == (8, 2)
    for rows in (1, 2, 6):
        plain, compiled = arguments(rows, *fixed), arguments(rows, *fixed)
        for wanted, found in zip(module(*plain), split(*compiled)):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(compiled[2], plain[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shallow, deep", [
    (lambda: tiny_deepseek_v3(4), lambda: tiny_deepseek_v3(6)),  # of three layers, each is followed by another kind
    (lambda: tiny_kimi_linear(4), lambda: tiny_kimi_linear(6)),
], ids=["deepseek_v3", "kimi_linear"])  # fmt: skip
def test_deeper_models_have_more_regions_but_no_other_ones(shallow, deep, monkeypatch) -> None:
    monkeypatch.setattr(_compat, "compile_graph", Uncompiled())
    found = []
    for model in (shallow(), deep()):
        _, report = compile_graph(capture(model), CONFIG.replace(lowering="inductor"), ParallelLayout())
        found.append(report.regions)
    assert found[1].regions > 1.3 * found[0].regions
    assert len(found[1].compiled) == len(found[0].compiled)


def test_an_engine_on_regions_computes_what_one_node_by_node_does(monkeypatch) -> None:
    monkeypatch.setattr(_compat, "compile_graph", Uncompiled())
    captured = capture(tiny_kimi_k3(3, attn_res_block_size=1))
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(VOCAB, (count,), generator=generator) for count in (9, 1, 4)]
    results = []
    for lowering in ("eager", "inductor"):
        engine, _ = compile_graph(captured, CONFIG.replace(lowering=lowering), ParallelLayout())
        with engine.open(3, 20) as session:
            logits = [session.prefill(prompts), session.decode(torch.tensor([1, 2, 3]), [True, False, True])]
            logits.append(session.verify(torch.tensor([[4, 5, 6]] * 3), [3, 2, 0]))
            session.commit([1, 2, 0])
            logits.append(session.decode(torch.tensor([7, 8, 9]), [True] * 3))
        results.append([*logits, *engine.states.values()])
    assert all(map(torch.equal, *results))
