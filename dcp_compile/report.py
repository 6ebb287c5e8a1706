# SPDX-License-Identifier: Apache-2.0
"""explain(): what was rewritten, what runs it, and what it costs."""

from __future__ import annotations

from transformers import PreTrainedModel

from .errors import UnsupportedModelError
from .ops import exchange
from .passes.graph_tools import census


def explain(model: PreTrainedModel) -> str:
    """A report on an optimised model: layers, calls before and after every pass, backend, memory, collectives.

    Raises:
        UnsupportedModelError: the model is not optimised.
    """
    optimized = model.__dict__.get("_dcp")
    if optimized is None:
        raise UnsupportedModelError(f"{type(model).__name__} is not optimised; call dcp_compile.optimize(model) first")
    config, parallel, report = optimized.config, optimized.parallel, optimized.report
    graph = report.graph
    site = graph.sites[0]
    recurrent = sum(ref.kind == "state" for ref in graph.states.values())
    lines = [
        f"{type(model).__name__}: {len(graph.sites)} MLA layers absorbed "
        f"({site.heads} heads, latent {site.latent_dim} + rope {site.rope_dim}), {recurrent} recurrent layers",
        f"ranks: dcp {parallel.dcp_size} (this is {parallel.dcp_rank}), tp {parallel.tp_size} (this is {parallel.tp_rank}), "
        f"heads {'sharded' if parallel.heads_sharded else 'replicated'}, interleave {config.kv_interleave}, "
        f"block {config.block_size}",
        f"attention: backend {report.choice.name}, layout {report.layout}",
    ]
    lines += [f"  not {name}: {'; '.join(reasons)}" for name, reasons in report.choice.rejected.items()]
    lines += _pass_table(report.passes)
    prologue = sum(census(graph.prologue.graph).values())
    lines.append(f"one step: 1 prologue of {prologue} calls, body of {sum(census(graph.graph).values())} calls")
    lines += _memory(model._dcp_engine, parallel.dcp_size)
    lines.append(f"exchange: {report.path.name} ({report.path.reason})")
    lines.append(f"collectives per step: {_collectives(graph) or 'none'}")
    return "\n".join(lines)


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


def _memory(engine, dcp_size: int) -> list[str]:
    caches = [tensor for ref, tensor in engine.states.items() if ref.kind == "kv_cache"]
    states = [tensor for ref, tensor in engine.states.items() if ref.kind != "kv_cache"]
    per_token = sum(tensor.shape[-1] * tensor.element_size() for tensor in caches)
    per_sequence = sum(tensor[0].numel() * tensor.element_size() for tensor in states)
    pool = sum(tensor.numel() * tensor.element_size() for tensor in caches)
    lines = [
        f"KV cache: {per_token} bytes per token, {per_token / dcp_size:g} per token and rank; "
        f"{engine.pages.total} pages, {pool / 2**20:.1f} MiB on this rank"
    ]
    if states:
        lines.append(f"recurrent state: {per_sequence / 2**20:.2f} MiB per sequence on this rank")
    return lines


def _collectives(graph) -> str:
    """How often the ranks meet in one step: exchanges of attention, and what the model itself sums or gathers."""
    counts = census(graph.graph)
    names = {name: name.split("::")[1] for name in counts if name.startswith("_c10d_functional::")}
    names |= {f"dcp::{name}": name for name in exchange.NAMES if f"dcp::{name}" in counts}
    names.pop("_c10d_functional::wait_tensor", None)
    return ", ".join(f"{counts[name]} {short}" for name, short in sorted(names.items(), key=lambda item: item[1]))
