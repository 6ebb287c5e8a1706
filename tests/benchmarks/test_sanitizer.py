# SPDX-License-Identifier: Apache-2.0
"""What the script reads out of the tools' reports, and what it lets pass."""

from __future__ import annotations

import pytest

from benchmarks.sanitizer import missed, summary

HAZARD = """
========= Error: Potential {kind} hazard detected at __shared__ 0x{address:x} in block (0,2,0) :
=========     Write Thread (31,0,0) at {kernel}+0xaab0 in first.py:250
=========     Read Thread (64,0,0) at {kernel}+0xac40 in second.py:47
=========     Current Value : 0, Incoming Value : 2
"""


def report(*found: tuple[str, str]) -> str:
    text = "".join(HAZARD.format(kind=kind, kernel=kernel, address=n) for n, (kernel, kind) in enumerate(found))
    return f"========= COMPUTE-SANITIZER\n{text}========= RACECHECK SUMMARY: {len(found)} hazards displayed (1 errors)"


def row(tool: str, text: str) -> dict:
    return {"tool": tool, "case": "some", "tail": text[-9:], **summary(tool, text)}


def test_equal_hazards_are_counted() -> None:
    found = summary("racecheck", report(("_kda", "RAW"), ("_tail", "WAR"), ("_kda", "RAW")))
    where = "first.py:250 / second.py:47"
    assert found == {
        "errors": 3,
        "hazards": [
            {"kernel": "_kda", "kind": "RAW", "where": where, "count": 2},
            {"kernel": "_tail", "kind": "WAR", "where": where, "count": 1},
        ],
    }


@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_any_error_is_missed(tool: str) -> None:
    assert not list(missed(row(tool, "========= ERROR SUMMARY: 0 errors")))
    (text,) = missed(row(tool, "========= Invalid\n========= ERROR SUMMARY: 1 error"))
    assert text == f"some, {tool}: 1 errors"


def test_only_the_known_hazards_pass() -> None:
    assert not list(missed(row("racecheck", report())))
    assert not list(missed(row("racecheck", report(("_mla_hopper", "RAW")))))
    for kernel, kind in (("_mla_hopper", "WAR"), ("_mla_hopper", "WAW"), ("_mla_hopper_2", "RAW"), ("_kda", "RAW")):
        (text,) = missed(row("racecheck", report(("_mla_hopper", "RAW"), (kernel, kind))))
        assert kind in text and kernel in text


def test_a_tool_that_breaks_off_is_missed() -> None:
    (text,) = missed(row("racecheck", "stopped after 300 s"))
    assert text == "some, racecheck: did not end; the last it printed: ter 300 s"
