# SPDX-License-Identifier: Apache-2.0
"""Decoding on several ranks, setting by setting, against what transformers decodes on one.

As a script: reads settings by number of ranks, prints one result per setting, both as JSON. Models are captured once and
forked, except those that are split over the ranks: their step differs by rank.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from dcp_compile.capture import capture
from dcp_compile.config import DCPConfig
from dcp_compile.parallel import ParallelLayout, parallel_layout
from dcp_compile.parallel.shard import shard_model
from tests.backends.fake_flashinfer import install
from tests.distributed.ranks import run_ranks
from tests.runtime.reference import (
    BLOCK,
    MODELS,
    TRAINED,
    Captured,
    Reference,
    decode_by_transformers,
    decode_greedily,
)
from tests.runtime.speculation import decode_in_rounds, with_stale_prefixes

INTERLEAVES = (1, 4, BLOCK)
LAYOUTS = ("split", "flattened")
CHUNKS = (5, 64, 512)
_STEPS = 8
_LONG = 211


@dataclass(frozen=True)
class Setting:
    """One way to decode.

    Attributes:
        chunk: of the prefill. layers: of the model, None = its default.
        speculation: draft tokens of random verify rounds (see :func:`decode_in_rounds`); 0 = plain greedy decoding.
        stale: prefixes of the split layout are random older lengths.
        expert_parallel: how experts are split with tp > 1. loaded: each rank loads its part from a folder, with MXFP4
            experts, and does not cut it from a whole model. replicated: so are the query projections in a DCP group.
        backend: of attention; "flashinfer" is the one that plans, on a stand-in for its library.
    """

    model: str
    tp: int
    dcp: int
    interleave: int
    layout: str
    chunk: int
    layers: int | None = None
    speculation: int = 0
    stale: bool = False
    expert_parallel: bool = False
    loaded: bool = False
    replicated: bool = False
    backend: str = "auto"

    @property
    def build(self) -> tuple[str, int | None, bool]:
        return self.model, self.layers, self.loaded


def prompt_lengths(dcp: int, interleave: int) -> list[int]:
    """Every length up to two rounds of dealing and three more: shards that are empty, partial, even and odd."""
    return list(range(1, 2 * dcp * interleave + 4))


def build(setting: Setting) -> Any:
    return (MODELS | TRAINED)[setting.model](**({} if setting.layers is None else {"layers": setting.layers}))


@dataclass(frozen=True)
class Prepared:
    """What the ranks are forked with, per model: its folder, its captured step if all ranks share it, its references."""

    folder: Path
    shared: Captured | None
    short: Reference
    long: Reference


def prepare(settings: Sequence[Setting], seed: int, folder: Path) -> dict[tuple, Prepared]:
    prepared = {}
    for setting in settings:
        if setting.build in prepared:
            continue
        same = [other for other in settings if other.build == setting.build]
        model, own_folder = build(setting), folder / str(len(prepared))
        if setting.loaded:
            model = through_folder(model, own_folder)
        longest = max(len(prompt_lengths(other.dcp, other.interleave)) for other in same)
        prepared[setting.build] = Prepared(
            folder=own_folder,
            shared=Captured(model, capture(model)) if any(other.tp == 1 for other in same) else None,
            short=decode_by_transformers(model, list(range(1, longest + 1)), _STEPS, seed),
            long=decode_by_transformers(model, [_LONG, 3, _LONG - 70], _STEPS, seed + 1),
        )
    return prepared


def check_settings(
    settings: Sequence[Setting], prepared: dict[tuple, Prepared], seed: int, sparse: bool
) -> list[list[float]]:
    """``[wrong tokens, largest error]`` per setting, of the short and the long prompts together, on this rank.

    Args:
        sparse: take only the prompt lengths around the borders of a round of dealing.
    """
    sharded: dict[tuple, Captured] = {}
    layouts: dict[tuple[int, int], ParallelLayout] = {}
    results = []
    for setting in settings:
        place = setting.tp, setting.dcp
        if place not in layouts:
            config = DCPConfig(tp_size=setting.tp, dcp_size=setting.dcp)
            layouts[place] = parallel_layout(config, torch.device("cpu"))
        given = prepared[setting.build]
        step = given.shared
        if setting.tp > 1:
            key = (*setting.build, setting.tp, setting.expert_parallel, setting.replicated and setting.dcp)
            if key not in sharded:
                sharded[key] = _capture_part(setting, layouts[place], given.folder)
            step = sharded[key]
        results.append(_check(setting, step, layouts[place], given, seed, sparse))
    return results


def through_folder(model: Any, folder: Path) -> Any:
    """The model as it is after having been saved, in several files with MXFP4 experts, and loaded again."""
    model.save_pretrained(folder, expert_format="mxfp4", max_shard_size="150KB")
    return AutoModelForCausalLM.from_pretrained(folder)


def _capture_part(setting: Setting, parallel: ParallelLayout, folder: Path) -> Captured:
    if setting.loaded:
        options = {"tp_size": setting.tp, "expert_parallel": setting.expert_parallel}
        if setting.replicated:
            options |= {"query_projection": "replicated", "dcp_size": setting.dcp}
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    else:
        model = build(setting)
        shard_model(model, parallel, setting.expert_parallel, setting.dcp if setting.replicated else 1)
    return Captured(model, capture(model))


def _check(
    setting: Setting, step: Captured, parallel: ParallelLayout, given: Prepared, seed: int, sparse: bool
) -> list[float]:
    engine = step.engine(
        parallel,
        kv_interleave=setting.interleave,
        decode_layout=setting.layout,
        backend=setting.backend,
        prefill_chunk=setting.chunk,
        num_speculative_tokens=setting.speculation,
        max_batch_size=len(given.short.prompts),
        max_seq_len=given.long.longest,
    )
    if setting.stale:
        engine = with_stale_prefixes(engine, seed)
    span = setting.dcp * setting.interleave
    lengths = prompt_lengths(setting.dcp, setting.interleave)
    if sparse:
        near = {1, 2, 3, *(border + by for border in (span, 2 * span) for by in (-1, 0, 1, 3))}
        lengths = [length for length in lengths if length in near]
    short = given.short.rows([length - 1 for length in lengths])
    decode = (lambda part: decode_in_rounds(engine, part, seed)) if setting.speculation else (
        lambda part: decode_greedily(engine, part)
    )  # fmt: skip
    outcomes = [decode(short), decode(given.long)]
    return [sum(found.wrong_tokens for found in outcomes), max(found.error for found in outcomes)]


def run(
    by_world: Mapping[int, Sequence[Setting]], seed: int, sparse: bool, timeout: float
) -> Iterator[dict[str, Any]]:
    """Every setting on as many ranks as its key says, with the worst of its results over the ranks.

    Args:
        timeout: seconds for all settings of one number of ranks.

    Raises:
        RuntimeError: a rank failed.
    """
    torch.set_num_threads(1)
    install(pytest.MonkeyPatch())  # in this process and all that are forked from it
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare([setting for settings in by_world.values() for setting in settings], seed, Path(folder))
        for world, settings in by_world.items():
            by_rank = run_ranks(world, check_settings, settings, prepared, seed, sparse, timeout=timeout)
            failed = [result for result in by_rank if isinstance(result, str)]
            if failed:
                raise RuntimeError("\n".join(failed))
            for setting, ranks in zip(settings, zip(*by_rank)):
                worst = {"wrong_tokens": max(r[0] for r in ranks), "error": max(r[1] for r in ranks)}
                yield {"ranks": world, **dataclasses.asdict(setting), **worst}


if __name__ == "__main__":
    disable_progress_bar()
    request = json.load(sys.stdin)
    by_world = {int(world): [Setting(**s) for s in settings] for world, settings in request.pop("settings").items()}
    json.dump(list(run(by_world, **request)), sys.stdout)
