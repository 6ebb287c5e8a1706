# SPDX-License-Identifier: Apache-2.0
"""optimize() and generate() on parts of a Kimi-K3 and its draft, against the whole models on one rank.

``python -m tests.distributed.parts [--worlds 2 4] [--layers N] [--seed N]`` prints the number of settings and of failures per
number of ranks, and every failing setting, and exits with 1 if there is one. test_parts.py runs a few.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import dcp_compile
from dcp_compile import DCPConfig
from tests.distributed.grid import through_folder
from tests.distributed.ranks import run_ranks
from tests.models.k3_dspark.tiny_draft import draft_for
from tests.runtime.reference import TOLERANCE, calm_kimi_k3, decode_by_transformers, largest

SIZES = {2: [(2, 1), (2, 2)], 4: [(4, 2), (4, 4)]}
"""(tp, dcp) by number of ranks."""
CONFIG = DCPConfig(block_size=4, max_batch_size=2, max_seq_len=64, prefill_chunk=8, num_speculative_tokens=3)
_STEPS = 8
_LENGTHS = [13, 1]


@dataclass(frozen=True)
class Setting:
    """``loaded``: the ranks load their parts from folders, and do not cut them from whole models. ``replicated``: query
    projections are, in a DCP group."""

    tp: int
    dcp: int
    draft: bool
    expert_parallel: bool
    loaded: bool
    replicated: bool = False


@dataclass(frozen=True)
class Expected:
    """Where the models are, and what they do on one rank.

    Attributes:
        target, draft: folders. prompts: of the two rows. tokens: ``[rows, steps]``, their greedy continuations.
        block: base logits of the draft's first block, ``[rows, width, vocab]``.
    """

    target: Path
    draft: Path
    prompts: list[Tensor]
    tokens: Tensor
    block: Tensor


def expect(folder: Path, layers: int, seed: int) -> Expected:
    whole = calm_kimi_k3(layers)
    whole.generation_config.eos_token_id = None
    target = through_folder(whole, folder / "target")
    draft = draft_for(target, (0, layers - 1), seed, num_attention_heads=4)
    draft.save_pretrained(folder / "draft")
    reference = decode_by_transformers(target, _LENGTHS, _STEPS, seed)
    dcp_compile.optimize(target, config=CONFIG, draft=draft)
    block = first_block(target, reference.prompts)
    return Expected(folder / "target", folder / "draft", reference.prompts, reference.tokens, block)


def first_block(target: Any, prompts: list[Tensor]) -> Tensor:
    """Base logits of the block that an optimised target's draft proposes after the prompts."""
    draft = target._dcp.draft
    with target._dcp_engine.open(len(prompts), 32) as session:
        session.taps_sink = draft.ingest
        anchors = session.prefill(prompts).argmax(dim=-1).cpu()
        lengths, counts = torch.tensor(session.lengths), torch.full_like(anchors, draft.width)
        return draft.run_block(anchors, lengths, session.block_table, counts, draft.width)[0]


def check_setting(setting: Setting, expected: Expected) -> list[str]:
    """What this rank finds wrong."""
    queries = {"query_projection": "replicated"} if setting.replicated else {}
    draft_options = {"tp_size": setting.tp, **queries} if setting.loaded else {}
    if setting.loaded and setting.replicated:
        draft_options["dcp_size"] = setting.dcp
    options = {**draft_options, "expert_parallel": setting.expert_parallel} if setting.loaded else {}
    target = AutoModelForCausalLM.from_pretrained(expected.target, **options)
    draft = AutoModel.from_pretrained(expected.draft, **draft_options) if setting.draft else None
    before = [{**model.state_dict()} for model in (target, draft) if model is not None]
    faults = []

    def compare(what: str, **options: Any) -> None:
        if not generate(target, expected.prompts, **options).equal(expected.tokens):
            faults.append(what)

    if setting.loaded:
        compare("plain generate() of the part")
    config = CONFIG
    if not setting.loaded:
        config = CONFIG.replace(tp_size=setting.tp, expert_parallel=setting.expert_parallel, **queries)
    dcp_size = None if setting.dcp == setting.tp else setting.dcp  # all ranks is what None means
    dcp_compile.optimize(target, dcp_size=dcp_size, config=config, draft=draft)
    parallel = target._dcp.parallel
    if (parallel.tp_size, parallel.dcp_size) != (setting.tp, setting.dcp):
        faults.append(f"sizes {parallel.tp_size}, {parallel.dcp_size}")
    compare("generate()")
    lines = dcp_compile.explain(target).splitlines()
    gathers = sum("gather_heads" in line for line in lines if line.startswith("collectives per "))
    if gathers != (0 if setting.replicated or setting.dcp == 1 else 1 + setting.draft):
        faults.append(f"{gathers} graphs gather queries")
    if draft is not None:
        compare("generate() with the draft", assistant_model=draft)
        error = largest(first_block(target, expected.prompts) - expected.block)
        if not error <= TOLERANCE:
            faults.append(f"logits of the draft are off by {error}")
    dcp_compile.unoptimize(target)
    for model, state in zip((target, draft), before):
        after = model.state_dict()
        faults += [f"{name} is not restored" for name in state if not after[name].equal(state[name])]
    compare("generate() afterwards")
    return faults


def generate(model: Any, prompts: list[Tensor], **options: Any) -> Tensor:
    columns = max(len(prompt) for prompt in prompts)
    ids = torch.stack([torch.nn.functional.pad(prompt, (columns - len(prompt), 0)) for prompt in prompts])
    mask = torch.stack([(torch.arange(columns) >= columns - len(prompt)).long() for prompt in prompts])
    options = {"max_new_tokens": _STEPS, "do_sample": False, "eos_token_id": None, **options}
    return model.generate(ids, attention_mask=mask, **options)[:, columns:]


def check_settings(settings: Sequence[Setting], expected: Expected) -> list[list[str]]:
    return [check_setting(setting, expected) for setting in settings]


def run(settings: Sequence[Setting], layers: int, seed: int, timeout: float) -> Iterator[dict[str, Any]]:
    """Every setting with what any of its ranks finds wrong.

    Raises:
        RuntimeError: a rank failed.
    """
    torch.set_num_threads(1)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        expected = expect(Path(folder), layers, seed)
        for world in sorted({setting.tp for setting in settings}):
            own = [setting for setting in settings if setting.tp == world]
            by_rank = run_ranks(world, check_settings, own, expected, timeout=timeout)
            failed = [result for result in by_rank if isinstance(result, str)]
            if failed:
                raise RuntimeError("\n".join(failed))
            for setting, found in zip(own, zip(*by_rank)):
                faults = [f"rank {rank}: {fault}" for rank, faults in enumerate(found) for fault in faults]
                yield {**dataclasses.asdict(setting), "faults": faults}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--layers", type=int, default=2, help="of the model (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--settings", help="JSON list of settings to run instead; prints their results as JSON")
    options = parser.parse_args()
    if options.settings:
        chosen = [Setting(**setting) for setting in json.loads(options.settings)]
        print(json.dumps(list(run(chosen, options.layers, options.seed, timeout=600.0))))
        return 0
    print(f"seed {options.seed}", flush=True)
    failures = 0
    for world in options.worlds:
        choices = itertools.product(SIZES[world], *[(False, True)] * 4)
        settings = [Setting(*sizes, *flags) for sizes, *flags in choices if sizes[1] > 1 or not flags[-1]]
        results = list(run(settings, options.layers, options.seed, timeout=3 * 3600.0))
        bad = [result for result in results if result["faults"]]
        print(f"{world} ranks: {len(results)} settings, {len(bad)} failed", flush=True)
        print(*map(json.dumps, bad), sep="\n", end="\n" if bad else "")
        failures += len(bad)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
