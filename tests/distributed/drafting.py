# SPDX-License-Identifier: Apache-2.0
"""Decoding with drafts on one or several ranks, setting by setting, against what transformers decodes on one.

As a script: reads jobs by number of ranks, prints one result per job and rank, both as JSON. A job is the name of one of
JOBS with its arguments. Models and drafts are captured once and forked.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

import dcp_compile
from dcp_compile import DCPConfig
from dcp_compile.api import Optimized
from dcp_compile.capture import StepGraph, capture
from dcp_compile.compiler import DraftStep, compile_block, compile_graph, compile_replicated
from dcp_compile.generation.patch import attach
from dcp_compile.models.k3_dspark import load_draft
from dcp_compile.models.kimi_k3 import KimiK3ForCausalLM
from dcp_compile.models.mini import draft_path, mini_path
from dcp_compile.parallel import ParallelLayout, parallel_layout
from dcp_compile.runtime.engine import table_columns
from tests.backends.fake_flashinfer import install
from tests.distributed.ranks import run_ranks
from tests.generation.helpers import Scripted, chi_square_p, wrong
from tests.models.k3_dspark.tiny_draft import draft_for, target_heads, tiny_draft
from tests.models.k3_dspark.tiny_gqa_draft import gqa_draft
from tests.runtime.reference import Reference, calm_kimi_k3, decode_by_transformers

BLOCK = 8
BATCHES = {1: [9], 3: [21, 2, 10]}
STEPS = 10
_SMALL_VOCAB = 8


@dataclass(frozen=True)
class Pair:
    """A target and its draft, both captured."""

    target: Any
    draft: Any
    step: StepGraph
    block: StepGraph


def _captured(target: Any, draft: Any) -> Pair:
    target.generation_config.eos_token_id = None  # every row runs to its length limit
    block = capture(DraftStep(draft, target.get_input_embeddings(), target.get_output_embeddings()), ("hidden_states",))
    return Pair(target, draft, capture(target, ("taps",), tap_layers=tuple(draft.config.target_layer_ids)), block)


@functools.cache
def pair(name: str, seed: int) -> Pair:
    """The trained pair ("mini"), a random one ("tiny"), or a random one of few tokens ("few")."""
    if name == "mini":
        target = KimiK3ForCausalLM.from_pretrained(mini_path(), dtype=torch.float32).eval()
        return _captured(target, load_draft(draft_path(), dtype=torch.float32).eval())
    sizes = {"vocab_size": _SMALL_VOCAB, "pad_token_id": None, "eos_token_id": None} if name == "few" else {}
    layers = 2 if name == "few" else 3
    target = calm_kimi_k3(layers, seed=seed, **sizes)
    return _captured(target, draft_for(target, range(layers - 1), seed))


@functools.cache
def reference(name: str, seed: int, batch: int) -> Reference:
    return decode_by_transformers(pair(name, seed).target, BATCHES[batch], STEPS, seed)


@functools.cache
def place(dcp: int) -> ParallelLayout:
    return parallel_layout(DCPConfig(dcp_size=dcp), torch.device("cpu"))


class Optimised:
    """A pair behind an engine of the given settings, as a context: what optimize(target, draft=draft) leaves, without
    tracing again."""

    def __init__(self, pair: Pair, **settings: Any) -> None:
        self.pair = pair
        self.config = DCPConfig(**{"block_size": BLOCK, "max_batch_size": 3, "max_seq_len": 64, **settings})

    def __enter__(self) -> Any:
        target, parallel = self.pair.target, place(self.config.dcp_size)
        engine, report = compile_graph(self.pair.step, self.config, parallel)
        engine.tap_layers = tuple(self.pair.draft.config.target_layer_ids)
        attach(target, engine)
        target._dcp = Optimized(
            self.config, parallel, report, lambda: None, *compile_block(self.pair.block, self.pair.draft, engine)
        )
        return target

    def __exit__(self, *exception: object) -> None:
        dcp_compile.unoptimize(self.pair.target)


def check_greedy(name: str, seed: int, kind: str, batches: Sequence[int], **settings: Any) -> dict[str, Any]:
    """Tokens that differ from plain decoding, over batches of one and of three ragged rows, and rounds per batch.

    Args:
        kind: "dspark", "oracle" (always right) or "adversary" (always wrong).
    """
    wrong_tokens, rounds = 0, []
    with Optimised(pair(name, seed), **settings) as model:
        for batch in batches:
            wanted = reference(name, seed, batch)
            columns = max(map(len, wanted.prompts))
            pads = torch.tensor([columns - len(prompt) for prompt in wanted.prompts])
            ids = torch.stack([torch.nn.functional.pad(p, (columns - len(p), 0)) for p in wanted.prompts])
            rows = [[*prompt.tolist(), *tokens.tolist()] for prompt, tokens in zip(wanted.prompts, wanted.tokens)]
            draft = {
                "dspark": lambda: pair(name, seed).draft,
                "oracle": lambda: Scripted(rows),
                "adversary": lambda: Scripted(rows, wrong),
            }[kind]()
            before = model._dcp_engine.verify_steps
            found = model.generate(
                ids, attention_mask=(torch.arange(columns) >= pads[:, None]).long(), assistant_model=draft,
                max_new_tokens=STEPS, do_sample=False,
            )  # fmt: skip
            rounds.append(model._dcp_engine.verify_steps - before)
            wrong_tokens += int((found[:, columns:] != wanted.tokens).sum())
    return {"wrong_tokens": wrong_tokens, "rounds": rounds}


def check_window(seed: int, windows: Sequence[int | None], kind: str = "latent", **settings: Any) -> float:
    """Largest error of float64 base logits against a draft that is given nothing but the window, densely.

    Args:
        kind: of the draft's attention, "latent", "grouped" or "grouped causal".
    """
    draft, block, heads = _block64(seed, kind)
    generator = torch.Generator().manual_seed(seed)
    lengths, counts = [1, 7, 26], [4, 1, 3]
    taps = [torch.randn(length, 28 * 3, generator=generator, dtype=torch.float64) for length in lengths]
    config = DCPConfig(**{"block_size": 4, "max_batch_size": 3, "max_seq_len": 64, **settings})
    columns = table_columns(config, config.dcp_size)
    table = torch.randperm(3 * columns, generator=generator).view(3, columns).int() + 1
    anchors = torch.randint(0, 60, (3,), generator=generator)
    error = 0.0
    for window in windows:
        engine = SimpleNamespace(
            config=config.replace(draft_window=window), parallel=place(config.dcp_size), device=torch.device("cpu")
        )
        if block is None:
            compiled = compile_replicated(DraftStep(draft, *heads), engine)
        else:
            compiled, _ = compile_block(block, draft, engine)
        for cache in compiled.caches:
            cache.fill_(torch.nan)
        for row, states in enumerate(taps):
            compiled.ingest(states, torch.arange(len(states))[None], table[row, None])
        base, _ = compiled.run_block(anchors, torch.tensor(lengths), table, torch.tensor(counts), max(counts))
        for row, (length, count) in enumerate(zip(lengths, counts)):
            first = 0 if window is None else max(0, length - window)
            cache = DynamicCache(config=draft.config)
            seen = draft.project_context(taps[row][None, first:])
            draft.ingest(seen, torch.arange(first, length)[None], cache)
            wanted = draft.draft_block(anchors[row, None], length, cache, *heads, count).base_logits[0]
            error = max(error, float((base[row, :count] - wanted).abs().nan_to_num(nan=torch.inf).max()))
    return error


@functools.cache
def _block64(seed: int, kind: str) -> tuple[Any, StepGraph | None, tuple[Any, Any]]:
    if kind != "latent":
        is_causal = kind == "grouped causal"
        draft = gqa_draft(seed, torch.float64, hidden_size=28, target_hidden_size=28, is_causal=is_causal)
        return draft, None, target_heads(draft, seed)
    draft = tiny_draft(seed, torch.float64, hidden_size=28)
    heads = target_heads(draft, seed)
    return draft, capture(DraftStep(draft, *heads), ("hidden_states",)), heads


def check_sampling(
    seed: int, sequences: int, acceptance: str, sampling: dict[str, Any], **settings: Any
) -> dict[str, float]:
    """p-value of the first three tokens of many sequences under their exact joint distribution, and tokens per round.

    The first token comes from the prefill; the others from kept drafts, corrections and the row after the last draft.
    """
    settings = {"max_batch_size": sequences, "max_seq_len": 16, **settings}
    prompt = torch.tensor([[3, 5, 2, 6]])
    exact = joint_distribution(pair("few", seed).target, prompt, sampling)
    with Optimised(pair("few", seed), **settings) as model:
        torch.manual_seed(seed + 1 + model._dcp.parallel.dcp_rank)  # the leader's numbers count
        found = model.generate(
            prompt, assistant_model=pair("few", seed).draft, do_sample=True, num_return_sequences=sequences,
            max_new_tokens=4, acceptance=acceptance, **sampling,
        )[:, 4:7]  # fmt: skip
        rounds = model._dcp_engine.verify_steps
    flat = (found * torch.tensor([_SMALL_VOCAB**2, _SMALL_VOCAB, 1])).sum(dim=1)
    counts = torch.bincount(flat, minlength=_SMALL_VOCAB**3)
    return {"p": chi_square_p(counts, exact), "rounds": rounds, "checksum": int((flat * torch.arange(1, len(flat) + 1)).sum())}


@torch.no_grad()
def joint_distribution(model: Any, prompt: Tensor, sampling: dict[str, Any]) -> Tensor:
    """Exact probabilities ``[V ** 3]`` of the first three tokens, from transformers' own warpers."""
    warpers = model._get_logits_processor(model._prepare_generation_config(None, do_sample=True, **sampling)[0], 4)
    sequences, probs = prompt, torch.ones(1, dtype=torch.float64)
    for _ in range(3):
        logits = model(sequences, use_cache=False).logits[:, -1].float()
        step = warpers(sequences, logits).softmax(dim=-1).double()
        probs = (probs[:, None] * step).flatten()
        tokens = torch.arange(step.shape[1]).repeat(len(sequences))[:, None]
        sequences = torch.cat([sequences.repeat_interleave(step.shape[1], dim=0), tokens], dim=1)
    return probs


class LeaderStops(StoppingCriteria):
    """Stops at a number of columns, on the leader alone; the other ranks never want to."""

    def __init__(self, columns: int, is_leader: bool) -> None:
        self._columns, self._is_leader = columns, is_leader

    def __call__(self, input_ids: Tensor, scores: Any, **unused: Any) -> Tensor:
        return torch.full((len(input_ids),), self._is_leader and input_ids.shape[1] >= self._columns)


def check_stops(seed: int, **settings: Any) -> dict[str, int]:
    """New columns, and wrong tokens in them, where the leader alone stops after five."""
    wanted = reference("tiny", seed, 1)
    with Optimised(pair("tiny", seed), **settings) as model:
        stop = LeaderStops(len(wanted.prompts[0]) + 5, model._dcp.parallel.is_leader)
        found = model.generate(
            wanted.prompts[0][None], assistant_model=pair("tiny", seed).draft, max_new_tokens=STEPS, do_sample=False,
            stopping_criteria=StoppingCriteriaList([stop]),
        )[:, len(wanted.prompts[0]) :]  # fmt: skip
    return {"new": found.shape[1], "wrong_tokens": int((found != wanted.tokens[:, : found.shape[1]]).sum())}


JOBS = {"greedy": check_greedy, "window": check_window, "sampling": check_sampling, "stops": check_stops}


def _work(jobs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Any]:
    return [JOBS[name](**arguments) for name, arguments in jobs]


def run(jobs: Mapping[int, Sequence[tuple[str, Mapping[str, Any]]]], timeout: float) -> dict[int, list[list[Any]]]:
    """What every rank found, by number of ranks and job.

    Raises:
        RuntimeError: a rank failed.
    """
    torch.set_num_threads(1)
    install(pytest.MonkeyPatch())  # in this process and all that are forked from it
    for kind, arguments in (job for group in jobs.values() for job in group):  # capture before forking
        if kind == "greedy":
            for batch in arguments["batches"]:
                reference(arguments["name"], arguments["seed"], batch)
        elif kind == "sampling":
            pair("few", arguments["seed"])
        elif kind == "stops":
            reference("tiny", arguments["seed"], 1)
        else:
            _block64(arguments["seed"], arguments.get("kind", "latent"))
    results = {}
    for world, group in jobs.items():
        by_rank = run_ranks(world, _work, list(group), timeout=timeout)
        failed = [result for result in by_rank if isinstance(result, str)]
        if failed:
            raise RuntimeError("\n".join(failed))
        results[world] = list(zip(*by_rank))
    return results


if __name__ == "__main__":
    request = json.load(sys.stdin)
    json.dump(run({int(world): jobs for world, jobs in request["jobs"].items()}, request["timeout"]), sys.stdout)
