# SPDX-License-Identifier: Apache-2.0
"""The passes in their order, and what is checked after each of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import fx

from dcp_compile.capture import StepGraph
from dcp_compile.errors import InvariantError

from . import absorb_mla, cleanup, hoist_metadata, insert_kv_write, join_projections, lower_kda, match_mla, shard_dcp
from .context import PassContext, PassResult
from .graph_tools import census

PASSES = (match_mla, absorb_mla, insert_kv_write, shard_dcp, lower_kda, hoist_metadata, join_projections, cleanup)
"""Each module has ``run(graph, context) -> PassResult`` and ``check(graph, context)``, its post-condition."""


def run_passes(graph: StepGraph, context: PassContext, passes: Sequence[ModuleType] = PASSES) -> list[PassResult]:
    """Rewrite ``graph`` in place with ``passes``, a run of PASSES; returns one record per pass.

    Raises:
        MatchError, UnsupportedModelError: a layer cannot be absorbed; raised by the first pass, before anything is
            rewritten.
        InvariantError: a pass broke its contract.
    """
    results = []
    for module in passes:
        before, outputs = _total_census(graph), _output_signature(graph)
        started = time.perf_counter()
        result = module.run(graph, context)
        result.seconds = time.perf_counter() - started
        result.before, result.after = before, _total_census(graph)
        _check_common(graph, result.name, outputs)
        module.check(graph, context)
        results.append(result)
    graph.module.recompile()
    return results


def _total_census(graph: StepGraph) -> Counter[str]:
    return census(graph.graph) + (census(graph.prologue.graph) if graph.prologue else Counter())


def _output_signature(graph: StepGraph) -> list:
    """Shape, stride and dtype of every output, symbolic sizes included."""
    returned = next(node for node in reversed(graph.graph.nodes) if node.op == "output").args[0]
    values = [node.meta["val"] for node in returned if isinstance(node, fx.Node)]
    return [(str(list(v.shape)), str(list(v.stride())), v.dtype) for v in values]


def _check_common(graph: StepGraph, name: str, outputs: list) -> None:
    graph.graph.lint()
    for node in graph.graph.nodes:
        if node.op in ("call_function", "placeholder") and "val" not in node.meta:
            raise InvariantError(f"{name}: node {node.name} has no fake value")
        if node.op == "call_function" and node.target is torch.ops.aten.copy_.default:
            raise InvariantError(f"{name}: node {node.name} writes into a graph input in a way no pass knows")
    if _output_signature(graph) != outputs:
        raise InvariantError(f"{name}: outputs changed from {outputs} to {_output_signature(graph)}")
