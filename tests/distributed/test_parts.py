# SPDX-License-Identifier: Apache-2.0
"""Parts of a model, loaded or cut, generate what the whole one does; what is said of them, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
import secrets

import pytest

from tests.distributed.parts import Setting
from tests.distributed.scripts import run_scenarios, run_script

SETTINGS = [
    Setting(tp=2, dcp=2, draft=True, expert_parallel=False, loaded=True),
    Setting(tp=2, dcp=1, draft=False, expert_parallel=True, loaded=False),
    Setting(tp=2, dcp=2, draft=True, expert_parallel=False, loaded=False, replicated=True),
]


@pytest.mark.slow
def test_parts_generate_what_the_whole_model_does() -> None:
    seed = secrets.randbelow(2**31)
    print(f"seed {seed}")
    settings = json.dumps([dataclasses.asdict(setting) for setting in SETTINGS])
    results = run_script("tests.distributed.parts", "--seed", str(seed), "--settings", settings, timeout=800.0)
    assert len(results) == len(SETTINGS)
    assert [result for result in results if result["faults"]] == []


@pytest.fixture(scope="module")
def reports() -> dict[str, list]:
    return run_scenarios("parts_that_cannot_be", "parts_that_differ", "parts_by_themselves")


def test_what_cannot_be_loaded_or_optimised(reports: dict[str, list]) -> None:
    wanted = {
        "sizes": (
            "ConfigError",
            "model.embed_tokens.weight [128, 64]: dim 0=128 does not divide over tp_size=3 ranks; choose a tp_size that "
            "divides 4, or tp_size=1 with dcp_size > 1",
        ),
        "experts of one rank": ("ConfigError", "expert_parallel=True needs tp_size > 1"),
        "queries of one rank": ("ConfigError", 'query_projection="replicated" with tp_size=1, dcp_size=1'),
        "queries": ("ConfigError", "query_projection='repeated' is not one of 'sharded', 'replicated'"),
        "ranks": ("ConfigError", "need a multiple of 6 ranks, but 3 are running"),
        "no experts": ("UnsupportedModelError", "expert_parallel=True, but K3DSparkModel has no experts"),
    }
    for report in reports["parts_that_cannot_be"]:
        for name, (kind, text) in wanted.items():
            assert report[name]["error"] == kind and text in report[name]["text"], name


def test_ranks_notice_other_files_and_other_values(reports: dict[str, list]) -> None:
    for report in reports["parts_that_differ"]:
        assert report["files"]["error"] == report["values"]["error"] == report["kinds"]["error"] == "RankError"
        assert "rank 1 disagrees with rank 0 on checkpoint files: " in report["files"]["text"]
        assert "rank 1 disagrees with rank 0 on weights that every rank holds whole: " in report["values"]["text"]
        assert "rank 1 disagrees with rank 0 on loaded in parts: " in report["kinds"]["text"]


def test_parts_by_themselves(reports: dict[str, list]) -> None:
    """A part computes what the whole does; it reads about its share, shows one bar, and is not saved or resized."""
    first, second = reports["parts_by_themselves"]
    for report in (first, second):
        for experts in ("sliced", "dealt"):
            found = report[experts]
            assert found["error"] < 1e-4
            assert found["saving"]["error"] == "CheckpointError"
            assert "one of 2 parts of a model" in found["saving"]["text"]
            assert found["contradiction"]["error"] == "ConfigError"
            assert "was loaded with tp_size=2" in found["contradiction"]["text"]
            assert 0.5 < found["read"] < 0.75  # of the bytes of all files; what is not split is read by both
        assert report["replicated"] < 1e-4
        for name, text in (
            ("other group", "dcp_size=1, but KimiK3ForCausalLM was loaded with tp_size=2, expert_parallel=False, "
                            "query_projection='replicated', dcp_size=2; leave it out"),
            ("other queries", "query_projection='replicated', but KimiK3ForCausalLM was loaded with tp_size=2, "),
        ):
            assert report[name]["error"] == "ConfigError" and text in report[name]["text"]
    assert [first["bars"], second["bars"]] == [True, False]
