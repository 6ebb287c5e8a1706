# SPDX-License-Identifier: Apache-2.0
"""A digest of a rewritten graph, equal on all ranks that will issue the same operators in the same order."""

from __future__ import annotations

import hashlib

from torch import fx

from dcp_compile.capture import StepGraph

from .graph_tools import EXCHANGES, METADATA


def graph_fingerprint(graph: StepGraph) -> str:
    """Digest of every call in order, without what differs by rank: its number and the names of its groups."""
    digest = hashlib.sha256()
    for part in (graph.prologue.graph, graph.graph):
        numbers = {node: index for index, node in enumerate(part.nodes)}
        for node in part.nodes:
            arguments = node.args
            if node.target in METADATA:
                arguments = (*arguments[:-3], *arguments[-2:])  # .., rank, dcp_size, interleave
            if getattr(node.target, "namespace", None) == "_c10d_functional" or node.target in EXCHANGES:
                arguments = arguments[:-1]  # .., group name
            everything = arguments, sorted(node.kwargs.items())
            numbered = fx.map_arg(everything, lambda operand: f"%{numbers[operand]}")  # noqa: B023
            target = node.target if node.op == "call_function" else ""
            digest.update(f"{node.op} {target} {numbered!r}".encode())
    return digest.hexdigest()[:16]
