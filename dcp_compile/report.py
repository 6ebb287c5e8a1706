# SPDX-License-Identifier: Apache-2.0
"""explain(): what was rewritten, what runs it, and what it costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ._compat import size_for_one_row
from .backends import get_backend, plans_prefixes
from .errors import UnsupportedModelError
from .generation.ahead import why_wait
from .parallel.shard import shard_of
from .passes.graph_tools import EXCHANGES, census
from .passes.shard_dcp import is_collective


def explain(model: PreTrainedModel) -> str:
    """A report on an optimised model: layers, calls before and after every pass, backend, memory, collectives.

    Raises:
        UnsupportedModelError: the model is not optimised.
    """
    optimized = model.__dict__.get("_dcp")
    if optimized is None:
        raise UnsupportedModelError(f"{type(model).__name__} is not optimised; call dcp_compile.optimize(model) first")
    config, parallel, report, shard = optimized.config, optimized.parallel, optimized.report, shard_of(model)
    graph = report.graph
    site = graph.sites[0]
    heads = "sharded" if parallel.heads_sharded else "replicated"
    recurrent = sum(ref.kind == "state" for ref in graph.states.values())
    lines = [
        f"{type(model).__name__}: {len(graph.sites)} MLA layers absorbed "
        f"({site.own_heads} heads, latent {site.latent_dim} + rope {site.rope_dim}), {recurrent} recurrent layers",
        f"ranks: dcp {parallel.dcp_size} (this is {parallel.dcp_rank}), tp {parallel.tp_size} (this is {parallel.tp_rank}), "
        f"heads {heads}{_queries(site)}, interleave {config.kv_interleave}, "
        f"block {config.block_size}",
        _weights(graph, config, shard.replicated_bytes(model) if shard is not None else 0),
        _attention(report),
    ]
    lines += _rejected(report)
    lines.append(_copies(graph))
    lines += _pass_table(report.passes)
    prologue = sum(census(graph.prologue.graph).values())
    lines.append(f"one step: 1 prologue of {prologue} calls, body of {sum(census(graph.graph).values())} calls")
    if report.regions is not None:
        lines.append(_regions(report.regions))
    lines += _memory(model._dcp_engine, parallel.dcp_size, config.kv_cache_scale)
    lines += _communication(graph, parallel, report.path)
    if optimized.draft is not None:
        lines += _draft(optimized.draft, optimized.draft_report)
        lines.append(_rounds(model._dcp_engine, optimized.draft))
    if model._dcp_engine.verify_costs is not None:
        lines += _adaptive(model._dcp_engine.verify_costs, optimized.draft)
    return "\n".join(lines)


def _queries(site) -> str:
    return "" if site.own is None else f" with the queries of {site.heads} made here"


def _attention(report) -> str:
    planned = report.layout == "split" and plans_prefixes(get_backend(report.choice.name))
    note = ", prefixes planned on the host" if planned else ""
    return f"attention: backend {report.choice.name}, layout {report.layout}{note}"


def _copies(graph) -> str:
    """Modules that were not traced, and modules that had to be."""
    refused = f"; traced in full, being out of the ordinary: {', '.join(graph.refused)}" if graph.refused else ""
    return f"capture: {graph.copied} modules copied from equal ones{refused}"


def _regions(regions) -> str:
    return f"regions: {regions.regions} in all programs, compiled: {len(regions.compiled)}"


def _pass_table(passes) -> list[str]:
    lines = ["pass              sites  calls before -> after   operators that changed"]
    for result in passes:
        before, after = sum(result.before.values()), sum(result.after.values())
        lines.append(f"{result.name:<16} {result.matches:>6}  {before:>12} -> {after:<6}  {_changes(result)}")
    return lines


def _changes(result) -> str:
    """The package's own operators whose count a pass changed."""
    names = sorted(name for name in result.before | result.after if name.startswith(("dcp::", "_c10d_functional::")))
    changed = [f"{name.split('::')[1]} {result.before[name]}->{result.after[name]}" for name in names
               if result.before[name] != result.after[name]]  # fmt: skip
    return ", ".join(changed) or "-"


def _memory(engine, dcp_size: int, kv_scale: float) -> list[str]:
    caches = [tensor for ref, tensor in engine.states.items() if ref.kind == "kv_cache"]
    states = [tensor for ref, tensor in engine.states.items() if ref.kind != "kv_cache"]
    per_token = sum(tensor.shape[-1] * tensor.element_size() for tensor in caches)
    per_sequence = sum(tensor[0].numel() * tensor.element_size() for tensor in states)
    pool = sum(tensor.numel() * tensor.element_size() for tensor in caches)
    lines = [
        f"KV cache: {per_token} bytes per token, {per_token / dcp_size:g} per token and rank; "
        f"{engine.pages.total} pages, {pool / 2**20:.1f} MiB on this rank; {_values(caches[0].dtype, kv_scale)}"
    ]
    if states:
        lines.append(
            f"recurrent state: {per_sequence} bytes ({per_sequence / 2**20:.2f} MiB) per sequence on this rank"
        )
    return lines


def _values(dtype: torch.dtype, kv_scale: float) -> str:
    """What the cache holds."""
    name = str(dtype).removeprefix("torch.")
    return f"{name} times {kv_scale:g}" if dtype == torch.float8_e4m3fn else name


def _weights(graph, config, replicated: int) -> str:
    """Parameters and buffers of this rank, of which ``replicated`` bytes serve to make other ranks' queries."""
    size = _bytes_held(graph.constants.values())
    if config.tp_size == 1:
        part = "the whole model"
    else:
        experts = "experts dealt whole" if config.expert_parallel else "experts sliced"
        part = f"one of {config.tp_size} parts, {experts} where the model has any"
    if replicated:
        part += f", {replicated} of them to make queries of other ranks"
    return f"weights: {size} bytes ({size / 2**20:.1f} MiB) on this rank, {part}"


def _bytes_held(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory that tensors, some of which are rows of others, lie on."""
    total = end = 0
    for start, size in sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors):
        total += max(0, start + size - max(start, end))
        end = max(end, start + size)
    return total


def _communication(graph, parallel, path) -> list[str]:
    meetings = _meetings(graph)
    if meetings is None:
        return ["collectives per step: none"]
    return [
        f"collectives per step: {meetings}",
        f"exchange of attention: {path.name} ({path.reason}); other collectives: torch.distributed with "
        f"{parallel.transport}",
    ]


def _meetings(graph) -> str | None:
    """Exchanges of attention and the model's own collectives of one step, and their bytes; None: there are none."""
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    calls = [node for node in calls if is_collective(node) or node.target in EXCHANGES]
    if not calls:
        return None
    counts = Counter(node.target.name().split("::")[1].partition(".")[0] for node in calls)
    handed_in = sum(_bytes_for_one_row(operand.meta["val"]) for node in calls for operand in node.all_input_nodes)
    return (
        f"{', '.join(f'{count} {name}' for name, count in sorted(counts.items()))}; {handed_in} bytes handed in by this "
        "rank for one row"
    )


def _bytes_for_one_row(fake: Tensor) -> int:
    """Bytes of a tensor of the graph in a step of one request with one row."""
    return fake.element_size() * math.prod(size_for_one_row(size) for size in fake.shape)


def _rejected(report) -> list[str]:
    return [f"  not {name}: {'; '.join(reasons)}" for name, reasons in report.choice.rejected.items()]


def _draft(draft, report) -> list[str]:
    sees = "all of its context" if draft.window is None else f"the latest {draft.window} tokens of its context"
    blocks = f"draft {type(draft.model).__name__}: blocks of up to {draft.width} tokens that see {sees}"
    if report is None:
        return [f"{blocks}; run as it is, with all keys and values of its {len(draft.caches)} layers on every rank"]
    return [
        f"{blocks}; {len(report.graph.sites)} MLA layers, backend {report.choice.name}, layout {report.layout}",
        *_rejected(report),
        *([_regions(report.regions)] if report.regions is not None else []),
        f"collectives per block: {_meetings(report.graph) or 'none'}",
    ]


def _rounds(engine, draft) -> str:
    reason = why_wait(engine, draft)
    if reason is not None:
        return f"rounds of draft and verify: each waits for the host; {reason}"
    return "rounds of draft and verify: follow one another on the device, the host reads tokens one round late"


def _adaptive(costs, draft) -> list[str]:
    """What adaptive verification weighs: chances against times."""
    lines = ["verify lengths: adaptive, milliseconds of a verify step by rows of all requests"]
    for requests, points in costs.table.items():
        times = ", ".join(f"{rows}: {1e3 * seconds:.3g}" for rows, seconds in points.items())
        block = f"; draft block {1e3 * draft.costs.seconds(requests, 0):.3g}" if draft is not None else ""
        lines.append(f"  up to {requests} requests  {times}{block}")
    head = draft is not None and draft.gives_confidence
    lines.append(
        "  chances: "
        + ("the DSpark draft's confidence head; for other drafts " if head else "")
        + "the running acceptance rate of each position"
    )
    return lines
