# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding on 2 and 4 ranks gives transformers' tokens and logits: a covering part of the full grid."""

from __future__ import annotations

import dataclasses
import itertools
import secrets

import pytest

from tests.distributed.grid import INTERLEAVES, LAYOUTS, Setting
from tests.distributed.scripts import run_script
from tests.runtime.reference import MODELS, TOLERANCE

# Replicated weights.
REPLICATED = [
    Setting("kimi_k3", 1, 2, 1, "split", 512),
    Setting("kimi_k3", 1, 4, 4, "split", 16),
    Setting("kimi_k3", 1, 2, 8, "flattened", 64),
    Setting("kimi_linear", 1, 4, 1, "flattened", 64),
    Setting("kimi_linear", 1, 2, 4, "flattened", 16),
    Setting("kimi_linear", 1, 4, 8, "split", 512),
    Setting("deepseek_v3", 1, 2, 1, "flattened", 16),
    Setting("deepseek_v3", 1, 4, 4, "flattened", 512),
    Setting("deepseek_v3", 1, 2, 8, "split", 64),
]
TRAINED = [Setting("mini", 1, 2, 4, "split", 64)]
# Models in parts; this Kimi-K3 has one recurrent and one attention layer, one dense and one with experts.
SHARDED = [
    Setting("kimi_k3", 2, 1, 1, "split", 16, layers=2),
    Setting("kimi_k3", 2, 2, 4, "flattened", 64, layers=2, expert_parallel=True, loaded=True),
    Setting("deepseek_v3", 2, 2, 8, "split", 512, layers=2),
    Setting("kimi_k3", 4, 1, 1, "flattened", 16, layers=2, expert_parallel=True),
    Setting("kimi_k3", 4, 2, 8, "flattened", 64, layers=2, expert_parallel=True),
    Setting("kimi_k3", 4, 4, 1, "split", 64, layers=2, loaded=True),
]
# Every rank of a DCP group makes all of the group's queries.
QUERIES_REPLICATED = [
    Setting("kimi_k3", 4, 2, 4, "split", 16, layers=2, expert_parallel=True, loaded=True, replicated=True),
]
# Rounds of verify and decode with ragged counts and rejected suffixes.
SPECULATIVE = [
    Setting("kimi_k3", 1, 2, 1, "split", 64, speculation=4, stale=True),
    Setting("kimi_k3", 1, 2, 4, "flattened", 64, speculation=3),
    Setting("kimi_linear", 1, 2, 8, "split", 64, speculation=2, stale=True),
    Setting("kimi_linear", 1, 2, 1, "flattened", 64, speculation=7),
    Setting("deepseek_v3", 1, 4, 1, "split", 64, speculation=7, stale=True),
    Setting("kimi_k3", 4, 4, 1, "split", 64, layers=2, speculation=3, stale=True, loaded=True, replicated=True),
]
# Prefixes planned on the host: old plans, older ones still, heads of this rank only, and ranks without a token.
PLANNED = [
    Setting("deepseek_v3", 1, 2, 1, "split", 16, backend="flashinfer"),
    Setting("deepseek_v3", 1, 4, 4, "split", 64, speculation=4, stale=True, backend="flashinfer"),
    Setting("kimi_k3", 2, 2, 8, "split", 64, layers=2, speculation=3, backend="flashinfer"),
]
# Two replicas of two ranks.
REPLICAS = [Setting("kimi_k3", 2, 2, 1, "flattened", 64, layers=2)]
ALL = REPLICATED + TRAINED + SHARDED + QUERIES_REPLICATED + SPECULATIVE + PLANNED
BY_WORLD = {
    world: [setting for setting in ALL if max(setting.tp, setting.dcp) == world] + (REPLICAS if world == 4 else [])
    for world in (2, 4)
}


@pytest.mark.slow
def test_ranks_decode_what_transformers_decodes() -> None:
    seed = secrets.randbelow(2**31)
    print(f"seed {seed}")
    settings = {world: [dataclasses.asdict(setting) for setting in settings] for world, settings in BY_WORLD.items()}
    request = {"settings": settings, "seed": seed, "sparse": True, "timeout": 400.0}
    results = run_script("tests.distributed.grid", request=request, timeout=800.0)
    assert len(results) == sum(map(len, BY_WORLD.values()))
    bad = [result for result in results if result["wrong_tokens"] or not result["error"] <= TOLERANCE]
    assert not bad


def test_the_settings_cover_every_value_and_the_pairs_that_matter() -> None:
    def seen(settings: list[Setting], *names: str) -> set[tuple]:
        return {tuple(getattr(setting, name) for name in names) for setting in settings}

    assert seen(REPLICATED, "model", "dcp") == set(itertools.product(MODELS, (2, 4)))
    assert seen(REPLICATED, "model", "layout") == set(itertools.product(MODELS, LAYOUTS))
    assert seen(REPLICATED, "model", "interleave") == set(itertools.product(MODELS, INTERLEAVES))
    for pair, values in {
        ("dcp", "layout"): itertools.product((2, 4), LAYOUTS),
        ("dcp", "interleave"): itertools.product((2, 4), INTERLEAVES),
        ("layout", "interleave"): itertools.product(LAYOUTS, INTERLEAVES),
        ("layout", "chunk"): itertools.product(LAYOUTS, (16, 64, 512)),
    }.items():
        assert seen(REPLICATED, *pair) == set(values)
    assert seen(SHARDED, "tp", "dcp") == {(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)}
    kimi = [setting for setting in SHARDED if setting.model == "kimi_k3"]
    assert seen(kimi, "expert_parallel", "loaded") == set(itertools.product((False, True), repeat=2))
    assert seen(SPECULATIVE, "model", "layout") >= set(itertools.product(("kimi_k3", "kimi_linear"), LAYOUTS))
