# SPDX-License-Identifier: Apache-2.0
"""All ranks of a group in one process: each rank's graph runs in a thread, collectives meet at a barrier."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, fx, nn

from dcp_compile.capture import StepGraph, capture
from dcp_compile.layout import pages_needed
from dcp_compile.lower import allocate_states, join_weights
from dcp_compile.passes import PASSES, PassContext, run_passes

c10d = torch.ops._c10d_functional
dcp = torch.ops.dcp


class Meeting:
    """What every rank brings to a collective."""

    def __init__(self, size: int):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.brought: list[Tensor | None] = [None] * size

    def all(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.brought[rank] = tensor
        self.barrier.wait()
        everything = list(self.brought)
        self.barrier.wait()
        return everything


class Rank(fx.Interpreter):
    """Runs a graph as one rank of the meeting."""

    def __init__(self, module: fx.GraphModule, rank: int, meeting: Meeting):
        super().__init__(module)
        self.rank, self.meeting = rank, meeting

    def call_function(self, target, args, kwargs):
        if target is c10d.wait_tensor.default:
            return args[0]
        if target is c10d.all_reduce.default:
            return torch.stack(self.meeting.all(self.rank, args[0])).sum(dim=0)
        if target is dcp.gather_heads.default:
            return torch.cat(self.meeting.all(self.rank, args[0]), dim=1)
        if target is dcp.merge_ranks.default:
            out, lse, heads, *_ = args
            outs, lses = (torch.stack(self.meeting.all(self.rank, part)) for part in (out, lse))
            mine = slice(None) if heads == out.shape[1] else slice(self.rank * heads, (self.rank + 1) * heads)
            return dcp.merge_partials(outs[:, :, mine], lses[:, :, mine])[0]
        return super().call_function(target, args, kwargs)


class Group:
    """Rewritten step and verify graphs of every rank, and one batch of requests that runs on them."""

    def __init__(self, captured: Sequence[StepGraph], context: PassContext, requests: int, longest: int):
        size = len(captured)
        columns = pages_needed(longest, context.block_size, size)
        context = dataclasses.replace(
            context, dcp_size=size, group="ranks" if size > 1 else None, pages=1 + requests * columns,
            state_slots=requests,
        )  # fmt: skip
        self.meeting = Meeting(size)
        self.graphs: list[dict[bool, StepGraph]] = []
        matched: dict[int, StepGraph] = {}
        for rank, original in enumerate(captured):
            if id(original) not in matched:
                matched[id(original)] = original.copy()
                run_passes(matched[id(original)], context, PASSES[:1])
            forms = {}
            for verify in (False, True):
                forms[verify] = matched[id(original)].copy()
                run_passes(forms[verify], dataclasses.replace(context, rank=rank, verify=verify), PASSES[1:])
                if not any(ref.kind == "state" for ref in original.states.values()):
                    forms[True] = forms[False]  # nothing to roll back: it is the same graph
                    break
            self.graphs.append(forms)
        for graph in {id(graph): graph for forms in self.graphs for graph in forms.values()}.values():
            join_weights(graph)
        self.states = [allocate_states(list(forms.values())) for forms in self.graphs]
        for states in self.states:
            for ref, tensor in states.items():
                if ref.kind == "kv_cache":
                    tensor.fill_(torch.nan)  # what is read before it is written shows
        order = torch.randperm(requests * columns, generator=torch.Generator().manual_seed(requests)) + 1
        self.table = order.view(requests, columns).int()
        self.slots = torch.arange(requests, dtype=torch.int32).flip(0)
        self.lengths = torch.zeros(requests, dtype=torch.int64)
        self.accepted = torch.zeros(requests, dtype=torch.int32)

    def run(self, tokens: Tensor, counts: Sequence[int], verify: bool = False, at_end: bool = False) -> Tensor:
        """Logits ``[B, S, V]`` of ``counts[b]`` new tokens per request, padded after them or before.

        A step keeps its tokens; of a verify step, :meth:`keep` says how many are kept.
        """
        batch, rows = tokens.shape
        positions = torch.full((batch, rows), -1)
        for request, count in enumerate(counts):
            start = rows - count if at_end else 0
            first = int(self.lengths[request])
            positions[request, start : start + count] = torch.arange(first, first + count)
        inputs = {
            "input_ids": tokens.flatten(),
            "row_positions": positions.flatten().clamp_min(0),
            "logit_rows": torch.arange(batch * rows),
            "positions": positions,
            "block_table": self.table,
            "prefix_lengths": self.lengths,
            "state_slots": self.slots,
            "accepted": self.accepted,
        }

        def on(rank: int) -> Tensor:
            graph, states = self.graphs[rank][verify], self.states[rank]

            def read(node: fx.Node) -> Tensor:
                if node in graph.step_inputs:
                    return inputs[graph.step_inputs[node]]
                return states[graph.states[node]] if node in graph.states else graph.constants[node]

            known = {*graph.step_inputs, *graph.states, *graph.constants}
            metadata = fx.Interpreter(graph.prologue).run(*(read(node) for node in graph.prologue_inputs))
            operands = [read(node) for node in graph.graph.find_nodes(op="placeholder") if node in known]
            with torch.no_grad():
                return Rank(graph.module, rank, self.meeting).run(*operands, *metadata)[0]

        with ThreadPoolExecutor(len(self.graphs)) as pool:
            logits = list(pool.map(on, range(len(self.graphs))))
        for other in logits[1:]:
            torch.testing.assert_close(other, logits[0], rtol=1e-5, atol=1e-5)
        self.accepted = torch.zeros_like(self.accepted)
        if not verify:
            self.lengths = self.lengths + torch.tensor(list(counts))
        return logits[0].unflatten(0, (batch, rows))

    def keep(self, counts: Sequence[int]) -> None:
        """Of the last verify step, the first ``counts[b]`` tokens are kept."""
        self.accepted = torch.tensor(list(counts), dtype=torch.int32)
        self.lengths = self.lengths + torch.tensor(list(counts))


def sharded_by_heads(model: nn.Module, size: int) -> list[StepGraph]:
    """What each of ``size`` tensor-parallel ranks captures: its own heads, and a sum after the output projection.

    The sum runs in the group "ranks", as it does wherever the tensor-parallel group is the DCP group.
    """
    graphs = []
    for rank in range(size):
        mine = copy.deepcopy(model)
        for layer in mine.model.layers:
            attention = layer.self_attn
            for name in ("q_proj", "q_b_proj", "kv_b_proj", "gate"):
                if getattr(attention, name, None) is not None:
                    projection = getattr(attention, name)
                    projection.weight = nn.Parameter(projection.weight.chunk(size, dim=0)[rank].clone())
            projection = attention.o_proj
            projection.weight = nn.Parameter(projection.weight.chunk(size, dim=1)[rank].clone())

            def summed(x: Tensor, inner=projection.forward) -> Tensor:
                return c10d.wait_tensor(c10d.all_reduce(inner(x), "sum", "ranks"))

            projection.forward = summed
        graphs.append(capture(mine))
    return graphs
