# SPDX-License-Identifier: Apache-2.0
"""The fingerprint tells apart whatever makes a graph compute something else, and only that."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import fx

from dcp_compile.passes.fingerprint import graph_fingerprint

add, cat, mul = torch.ops.aten.add.Tensor, torch.ops.aten.cat.default, torch.ops.aten.mul.Tensor


def fingerprint(build: Callable[[fx.Graph, fx.Node, fx.Node], fx.Node], name: str = "x") -> str:
    body = fx.Graph()
    result = build(body, body.placeholder(name), body.placeholder("y"))
    body.output(result)
    prologue = fx.Graph()
    prologue.output(())
    return graph_fingerprint(SimpleNamespace(prologue=SimpleNamespace(graph=prologue), graph=body))


def base(graph: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
    return graph.call_function(add, (x, y), {"alpha": 2})


@pytest.mark.parametrize(
    "other",
    [
        lambda graph, x, y: graph.call_function(add, (x, y), {"alpha": 3}),
        lambda graph, x, y: graph.call_function(add, (x, y)),
        lambda graph, x, y: graph.call_function(add, (y, x), {"alpha": 2}),
        lambda graph, x, y: graph.call_function(add, (x, 2.0), {"alpha": 2}),
        lambda graph, x, y: graph.call_function(mul, (x, y)),
        lambda graph, x, y: graph.call_function(cat, ([x, y], 1)),
    ],
)
def test_another_computation(other: Callable) -> None:
    assert fingerprint(other) != fingerprint(base)


@pytest.mark.parametrize("build", [base, lambda graph, x, y: graph.call_function(cat, ([x, y], 1))])
def test_names_do_not_count(build: Callable) -> None:
    assert fingerprint(build, "x") == fingerprint(build, "z")


def test_the_order_of_keywords_does_not_count() -> None:
    def result(keywords: dict) -> str:
        return fingerprint(lambda graph, x, y: graph.call_function(torch.ops.aten.empty_like.default, (x,), keywords))

    first = {"dtype": torch.float32, "pin_memory": False}
    assert result(first) == result(dict(reversed(first.items())))
    assert result(first) != result(first | {"dtype": torch.float16})
