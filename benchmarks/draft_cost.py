# SPDX-License-Identifier: Apache-2.0
"""What does a round's draft cost by context, with a window and without one?

A DSpark draft of the sizes published for Kimi-K3, bf16, one request, on a target with Kimi-K3's hidden size and
vocabulary and little else: of a round, only what the draft does is timed. That is the context entries of K + 1 accepted
rows, the block of K = 7 rows with the target's output head, and the Markov chain of K tokens. Each is the CUDA graph
that a round replays, without the copies that put its inputs in place. The caches are empty: what they hold does not
matter for time.

Run on a GPU: ``python -m benchmarks.draft_cost [--check] [--out DIR]``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

import dcp_compile
from benchmarks.measure import BYTES_PER_SECOND, RESULTS, replay_time, roofline, save
from dcp_compile.models import K3DSparkConfig, KimiK3Config

CONTEXTS, WINDOW, DRAFTS = (2048, 131072), 2048, 7
TAPS = 5  # target layers the draft reads, so the target has as many
MOST_GROWTH = 1.15  # of the draft's time with a window, from the shortest to the longest context


def build() -> tuple[PreTrainedModel, PreTrainedModel]:
    """The target and its draft. The target's layers are MLA with a small dense MLP: there is little to compile."""
    attention = {"full_attn_layers": list(range(1, TAPS + 1)), "kda_layers": []}
    target = KimiK3Config(
        num_hidden_layers=TAPS, first_k_dense_replace=TAPS, intermediate_size=1024, linear_attn_config=attention
    )
    draft = K3DSparkConfig(target_num_hidden_layers=TAPS, target_layer_ids=list(range(TAPS)))
    with torch.device("cuda"):
        return (
            AutoModelForCausalLM.from_config(target, dtype=torch.bfloat16).eval(),
            AutoModel.from_config(draft, dtype=torch.bfloat16).eval(),
        )


def predicted_us(model: PreTrainedModel, context: int) -> float:
    """Microseconds of the draft of ``model``, optimised with it, by what it reads.

    That is all weights once, the Markov head's output weights once per token and the target's output head once; and in
    every layer the cache entries a block sees, or the arithmetic on them where that takes longer.
    """
    draft = model._dcp.draft
    sizes, head = draft.model.config, draft.model.markov_head
    unread = ("markov_head.markov_w1", "confidence_head")  # a table with one row per token, and not part of full drafts
    nbytes = sum(weight.nbytes for name, weight in draft.model.named_parameters() if not name.startswith(unread))
    nbytes += (draft.width - 1) * head.markov_w2.weight.nbytes + model.get_output_embeddings().weight.nbytes
    seen = (context if draft.window is None else min(context, draft.window)) + draft.width
    products = seen * draft.width * sizes.num_attention_heads * (2 * sizes.kv_lora_rank + sizes.qk_rope_head_dim)
    attention = sum(roofline(seen * cache.shape[-1] * cache.element_size(), 2 * products) for cache in draft.caches)
    return nbytes / BYTES_PER_SECOND * 1e6 + attention


def replays(call: Callable[[], object]) -> Callable[[], object]:
    """What ``call`` replays, with the inputs that it puts in place; ``call`` itself where it replays no graph."""
    replay, graphs = torch.cuda.CUDAGraph.replay, []

    def noted(graph: torch.cuda.CUDAGraph) -> None:
        graphs.append(graph)
        replay(graph)

    with mock.patch.object(torch.cuda.CUDAGraph, "replay", noted):
        call()
    return (lambda: [replay(graph) for graph in graphs]) if graphs else call


def measure(
    model: PreTrainedModel, context: int, timed: Callable[[Callable[[], object]], float] = replay_time
) -> dict[str, object]:
    """The draft's part of a round after ``context`` tokens, K + 1 at least. ``timed`` gives the microseconds of a call.

    A draft keeps no lengths of its own: a block is told how much context there is, and finds it by the session's pages.
    """
    engine, draft = model._dcp_engine, model._dcp.draft
    rows = draft.width + 1
    taps = torch.randn(rows, draft.model.context_proj.in_features, device=engine.device, dtype=draft.model.dtype)
    positions = torch.arange(context - rows, context)[None]  # those of the verify step before, all of them accepted
    anchors, lengths, counts = (torch.tensor([value]) for value in (5, context, draft.width))
    with engine.open(1, context + rows) as session:
        table = session.block_table
        context_us = timed(replays(lambda: draft.ingest(taps, positions, table)))
        block_us = timed(replays(lambda: draft.run_block(anchors, lengths, table, counts, draft.width)))
        base, _ = draft.run_block(anchors, lengths, table, counts, draft.width)
        markov_us = timed(replays(lambda: draft.follow(anchors, base)))
    times = {"context_us": context_us, "block_us": block_us, "markov_us": markov_us}
    times["draft_us"] = sum(times.values())
    times["predicted_us"] = predicted_us(model, context)
    row = {"context": context, "window": draft.window}
    return row | {name: round(micros, 1) for name, micros in times.items()}


def growth(rows: list[dict], window: int | None) -> float:
    """Times as long as at the shortest context that the draft with ``window`` takes at the longest."""
    times = {row["context"]: row["draft_us"] for row in rows if row["window"] == window}
    return times[max(CONTEXTS)] / times[min(CONTEXTS)]


def missed(rows: list[dict]) -> list[str]:
    """The limits that the rows do not meet."""
    found = growth(rows, WINDOW)
    if found <= MOST_GROWTH:
        return []
    shortest, longest = min(CONTEXTS), max(CONTEXTS)
    return [f"window {WINDOW}: {found:.3f} x the time of context {shortest} at {longest}, at most {MOST_GROWTH}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 where a limit is missed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    model, draft = build()
    rows = []
    for window in (None, WINDOW):
        started = time.perf_counter()
        config = dcp_compile.DCPConfig(
            max_batch_size=1, max_seq_len=max(CONTEXTS) + 64, num_speculative_tokens=DRAFTS, draft_window=window
        )
        dcp_compile.optimize(model, config=config, draft=draft)
        print(f"window {window}: optimize() took {time.perf_counter() - started:.1f} s", flush=True)
        for context in CONTEXTS:
            rows.append(measure(model, context))
            print(rows[-1], flush=True)
        print(f"window {window}: {growth(rows, window):.3f} x at the longest context", flush=True)
        dcp_compile.unoptimize(model)
    save("draft_cost", rows, arguments.out)
    failed = missed(rows)
    print("missed:", *(failed or ["nothing"]), sep="\n  ")
    return 1 if arguments.check and failed else 0


if __name__ == "__main__":
    sys.exit(main())
