# SPDX-License-Identifier: Apache-2.0
"""A rank that dies, hangs or never joins is an error on all others within the configured timeout, never a hang."""

from __future__ import annotations

import pytest

from tests.distributed.scenarios import TIMEOUT
from tests.distributed.scripts import run_script

SCENARIOS = "tests.distributed.scenarios"


def assert_lost(report: dict) -> None:
    assert report["error"] == "RankError"
    assert report["text"].startswith("another rank died, or did not answer in time, while ")
    assert report["seconds"] <= 3 * TIMEOUT


@pytest.mark.parametrize("name, lost, ranks", [("leader_is_killed", 0, 2), ("follower_is_killed", 2, 4)])
def test_a_rank_is_killed_while_decoding(name: str, lost: int, ranks: int) -> None:
    reports = run_script(SCENARIOS, name)
    assert len(reports) == ranks
    assert reports.pop(lost) == "ended without an answer, exit code -9"
    for report in reports:
        assert_lost(report)


@pytest.mark.slow
def test_a_rank_hangs_while_decoding() -> None:
    waiting, hanging = run_script(SCENARIOS, "follower_hangs")
    assert hanging == "no answer in time"
    assert_lost(waiting)
    assert waiting["seconds"] >= TIMEOUT / 2


@pytest.mark.slow
def test_a_rank_dies_before_it_joins() -> None:
    waiting, dead = run_script(SCENARIOS, "rank_dies_while_optimising")
    assert dead == "ended without an answer, exit code -9"
    assert_lost(waiting)
    assert waiting["unchanged"]


@pytest.mark.slow
def test_a_rank_works_alone() -> None:
    """A rank with dcp_size=1 needs no group: it cannot know that the other rank waits for it."""
    waiting, alone = run_script(SCENARIOS, "no_group_on_one_rank")
    assert_lost(waiting)
    assert waiting["unchanged"] and alone["error"] is None
