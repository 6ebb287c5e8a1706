# SPDX-License-Identifier: Apache-2.0
"""A digest of a rewritten graph, equal on all ranks that will issue the same operators in the same order."""

from __future__ import annotations

import hashlib

from dcp_compile.capture import StepGraph

from .graph_tools import EXCHANGES, METADATA


def graph_fingerprint(graph: StepGraph) -> str:
    """Digest of every call in order, without what differs by rank: its number and the names of its groups."""
    digest = hashlib.sha256()
    for part in (graph.prologue.graph, graph.graph):
        numbers = {node: index for index, node in enumerate(part.nodes)}
        for node in part.nodes:
            operands = [numbers[operand] for operand in node.all_input_nodes]
            arguments = node.args
            if node.target in METADATA:
                arguments = (*arguments[:-3], *arguments[-2:])  # .., rank, dcp_size, interleave
            if getattr(node.target, "namespace", None) == "_c10d_functional" or node.target in EXCHANGES:
                arguments = arguments[:-1]  # .., group name
            literal = repr([a for a in arguments if not hasattr(a, "op")])
            digest.update(
                f"{node.op} {node.target if node.op == 'call_function' else ''} {operands} {literal}".encode()
            )
    return digest.hexdigest()[:16]
