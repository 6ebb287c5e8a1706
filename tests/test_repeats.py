# SPDX-License-Identifier: Apache-2.0
"""Layers of one kind are traced twice and then copied; whatever is out of the ordinary is traced in full."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, fx, nn

from dcp_compile import _compat
from dcp_compile.capture import StepGraph, capture
from dcp_compile.kinds import LayerNumber
from dcp_compile.passes.graph_tools import location
from dcp_compile.repeats import Repeats
from tests.tiny_models import tiny_deepseek_v3, tiny_kimi_k3

WIDTH, LAYERS = 4, 5


class Layer(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.layer_idx = number
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False)
        self.parts = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor, *, scale: float = 2.0) -> Tensor:
        return self.parts(self.projection(x)) * scale


class WritesItsInput(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x.view(-1).add_(1)
        return self.projection(x)


class KnowsItsNumber(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.layer_idx in (3,) else self.projection(x)


class CountsLayers(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.layer_idx >= LAYERS else self.projection(x)


class Alternates(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.projection(x)) if self.layer_idx % 2 else self.projection(x)


class ReadsAnothersWeight(Layer):
    others: list[Layer] = []

    def forward(self, x: Tensor) -> Tensor:
        self.others.append(self)
        return self.projection(x) + self.others[0].projection.weight.sum()


class ReturnsAView(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.projection(x), x[:, :2]


class Stack(nn.Module):
    """Every output of every layer counts, and so does every input after the layer has had it."""

    def __init__(self, layer: type[Layer], write_results: bool = False):
        super().__init__()
        ReadsAnothersWeight.others.clear()
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(numbers=list(range(LAYERS))[:1]))
        self.layers = nn.ModuleList([layer(number) for number in range(LAYERS)])
        self.write_results = write_results

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, total = x + 1, 0
        for layer in self.layers:
            before, result = x, layer(x)
            x, *others = result if isinstance(result, tuple) else (result,)
            for other in others:
                if self.write_results:
                    other.mul_(3)
                total = total + other.sum()
            total = total + before.sum()
        return x, total


def trace(model: nn.Module, repeats: Repeats | None) -> tuple[fx.GraphModule, dict[fx.Node, str]]:
    fakes = _compat.Fakes()
    names = dict(model.named_parameters())
    rows = fakes.symbolic(torch.zeros(5)).shape[0]
    x = fakes.mode.from_tensor(torch.zeros(1)).new_empty(rows, WIDTH)

    def step(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return torch.func.functional_call(model, dict(zip(names, weights)), (x,))

    with torch.no_grad(), repeats.watching() if repeats else nullcontext():
        module = _compat.trace(step, [x, *(fakes.static(weight.detach()) for weight in names.values())], fakes)
    return module, dict(zip(module.graph.find_nodes(op="placeholder"), ["x", *names]))


def traced(model: nn.Module) -> tuple[fx.GraphModule, Repeats, int]:
    """The graph with copies, and how many traces it took."""
    repeats, traces = Repeats(model), 1
    module, names = trace(model, repeats)
    while not repeats.expand(module.graph, names):
        module, names = trace(model, repeats)
        traces += 1
    module.recompile()
    return module, repeats, traces


def calls(graph: fx.Graph) -> list[tuple]:
    """A graph without its names: operators, operands by position, shapes, modules."""
    numbers = {node: f"%{index}" for index, node in enumerate(graph.nodes)}
    listed = []
    for node in graph.nodes:
        arguments = str(fx.map_arg((node.args, node.kwargs), lambda operand: numbers[operand]))
        listed.append((node.op, str(node.target) if node.op == "call_function" else "", arguments,
                       str(node.meta.get("val")), location(node) if node.meta.get("nn_module_stack") else ""))  # fmt: skip
    return listed


def check(model: nn.Module, module: fx.GraphModule) -> None:
    full, _ = trace(model, None)
    assert calls(module.graph) == calls(full.graph)
    inputs = [torch.randn(3, WIDTH), *(weight.detach() for weight in model.parameters())]
    assert all(map(torch.equal, module(*inputs), full(*inputs)))


@pytest.mark.parametrize("layer", [Layer, CountsLayers, ReturnsAView])
def test_the_first_two_are_traced_and_the_others_copied(layer: type[Layer]) -> None:
    model = Stack(layer)
    module, repeats, traces = traced(model)
    assert (repeats.copied, repeats.refused, traces) == (LAYERS - 2, set(), 1)
    check(model, module)


@pytest.mark.parametrize("make", [
    lambda: Stack(WritesItsInput),
    lambda: Stack(KnowsItsNumber),
    lambda: Stack(Alternates),
    lambda: Stack(ReadsAnothersWeight),
    lambda: Stack(ReturnsAView, write_results=True),
], ids=["writes", "number", "alternates", "foreign weight", "written view"])  # fmt: skip
def test_what_cannot_be_copied_is_traced_in_full_after_one_more_trace(make) -> None:
    model = make()
    module, repeats, traces = traced(model)
    assert repeats.copied == 0 and traces == 2
    assert repeats.refused >= {f"layers.{number}" for number in range(LAYERS)}
    check(model, module)


def other_width(model: Stack) -> None:
    model.layers[4].parts = nn.Sequential(nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH))


def other_attribute(model: Stack) -> None:
    model.layers[4].note = "x"


def other_function(model: Stack) -> None:
    layer = model.layers[4]
    plain = layer.forward
    layer.forward = lambda x: plain(x, scale=3.0)


def a_hook(model: Stack) -> None:
    model.layers[4].projection.register_forward_hook(lambda module, inputs, output: output + 1)


def training(model: Stack) -> None:
    model.layers[4].train(False)


@pytest.mark.parametrize("change", [other_width, other_attribute, other_function, a_hook, training])
def test_a_layer_that_is_built_otherwise_is_of_another_kind(change) -> None:
    model = Stack(Layer)
    change(model)
    module, repeats, traces = traced(model)
    assert (repeats.refused, traces) == (set(), 1) and 2 <= repeats.copied <= 3
    check(model, module)


TARGET: list[nn.Module] = []


def hooks_that_know_one(model: Stack) -> None:
    TARGET[:] = [model.layers[4]]
    for layer in model.layers:
        layer.register_forward_hook(lambda module, inputs, output: output * 3 if module in TARGET else output)


def wrappers_with_a_memory(model: Stack) -> None:
    def wrapped(plain):
        def forward(x):
            forward.calls += 1
            return plain(x) * (3 if forward.calls == 0 else 1)

        forward.calls = 0
        return forward

    for layer in model.layers:
        layer.forward = wrapped(layer.forward)


def attributes_that_hold_themselves(model: Stack) -> None:
    for layer in model.layers:
        layer.circle = []
        layer.circle.append(layer.circle)


@pytest.mark.parametrize("change", [hooks_that_know_one, wrappers_with_a_memory, attributes_that_hold_themselves])
def test_layers_that_somebody_changed_are_not_copied(change) -> None:
    model = Stack(Layer)
    change(model)
    module, repeats, _ = traced(model)
    assert not set(model.layers) & set(repeats.places)
    check(model, module)


def test_nothing_is_copied_under_hooks_of_all_modules() -> None:
    model = Stack(Layer)
    target = model.layers[4]
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: output * 3 if module is target else output
    )
    try:
        module, repeats, _ = traced(model)
        assert repeats.copied == 0
        check(model, module)
    finally:
        handle.remove()


def test_the_model_is_left_as_it_was() -> None:
    model = Stack(Layer)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    traced(model)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert all(type(layer.layer_idx) is int for layer in model.layers)


def test_a_layer_number_notices_only_what_depends_on_the_layer() -> None:
    noticed: list[int] = []
    number = LayerNumber(2, 4, lambda: noticed.append(1))
    assert [10, 11, 12][number] == 12 and not number >= 4 and number != 7 and number is not None and noticed == []
    for use in (lambda: number == 3, lambda: number in [0, 1], lambda: number < 2, lambda: number % 2, lambda: bool(number),
                lambda: number < 2.5, lambda: number >> 1, lambda: int(number), lambda: str(number),
                lambda: {number: 1}, lambda: number + 1, lambda: 1 - number):  # fmt: skip
        noticed.clear()
        use()
        assert noticed


@pytest.mark.parametrize("make, copied", [
    (lambda: tiny_deepseek_v3(4), 2),  # attention of layer 2 and all of layer 3; layer 0 has no experts
    (lambda: tiny_kimi_k3(6, attn_res_block_size=3), 5),  # experts of layers 3 to 5, attention of 2 of 4 KDA layers
], ids=["deepseek_v3", "kimi_k3"])  # fmt: skip
def test_a_capture_with_copies_equals_one_without(make, copied: int, monkeypatch) -> None:
    model = make()
    short = capture(model)
    assert (short.refused, short.copied) == ((), copied)
    monkeypatch.setattr(Repeats, "watching", lambda self: nullcontext())
    full = capture(model)
    assert full.copied == 0
    assert calls(short.graph) == calls(full.graph)
    assert _inputs(short) == _inputs(full)


def _inputs(graph: StepGraph) -> list:
    return [*graph.step_inputs.values(), *graph.states.values(), *(tensor.data_ptr() for tensor in graph.constants.values())]
