# SPDX-License-Identifier: Apache-2.0
"""Sharding heads over ranks, and undoing it."""

from __future__ import annotations

from tests.distributed.scripts import run_script

SCENARIOS = "tests.distributed.scenarios"


def test_generate_with_sharded_heads_and_back() -> None:
    """Four ranks of one head each, two groups that share the tokens between two of them."""
    reports = run_script(SCENARIOS, "heads_over_four_ranks")
    assert reports == [{"same": True, "restored": True, "after": True}] * 4


def test_heads_that_cannot_be_sharded() -> None:
    for odd_heads, no_table in run_script(SCENARIOS, "heads_that_do_not_divide"):
        assert odd_heads["error"] == no_table["error"] == "UnsupportedModelError"
        assert "3 attention heads, which do not divide over tp_size=2" in odd_heads["text"]
        assert "declares no head_sharding table" in no_table["text"]
        assert odd_heads["unchanged"] and no_table["unchanged"]
