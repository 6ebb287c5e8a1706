# SPDX-License-Identifier: Apache-2.0
"""A rank that dies, hangs or never joins is an error on all others within the configured timeout, never a hang."""

from __future__ import annotations

import pytest

from tests.distributed.scenarios import TIMEOUT
from tests.distributed.scripts import run_scenarios

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reports() -> dict[str, list]:
    return run_scenarios(
        "leader_is_killed", "follower_is_killed", "follower_hangs", "rank_dies_while_optimising", "no_group_on_one_rank"
    )


def assert_lost(report: dict) -> None:
    assert report["error"] == "RankError"
    assert report["text"].startswith("another rank died, or did not answer in time, while ")
    assert report["seconds"] <= 3 * TIMEOUT


@pytest.mark.parametrize("name, lost, ranks", [("leader_is_killed", 0, 2), ("follower_is_killed", 2, 4)])
def test_a_rank_is_killed_while_decoding(reports: dict[str, list], name: str, lost: int, ranks: int) -> None:
    answers = list(reports[name])
    assert len(answers) == ranks
    assert answers.pop(lost) == "ended without an answer, exit code -9"
    for answer in answers:
        assert_lost(answer)


def test_a_rank_hangs_while_decoding(reports: dict[str, list]) -> None:
    waiting, hanging = reports["follower_hangs"]
    assert hanging == "no answer in time"
    assert_lost(waiting)
    assert waiting["seconds"] >= TIMEOUT / 2


def test_a_rank_dies_before_it_joins(reports: dict[str, list]) -> None:
    waiting, dead = reports["rank_dies_while_optimising"]
    assert dead == "ended without an answer, exit code -9"
    assert_lost(waiting)
    assert waiting["unchanged"]


def test_a_rank_works_alone(reports: dict[str, list]) -> None:
    """A rank with dcp_size=1 needs no group: it cannot know that the other rank waits for it."""
    waiting, alone = reports["no_group_on_one_rank"]
    assert_lost(waiting)
    assert waiting["unchanged"] and alone["error"] is None
