# SPDX-License-Identifier: Apache-2.0
"""What the script reads out of the tools' reports, and what it lets pass."""

from __future__ import annotations

import pytest

from benchmarks.sanitizer import missed, settled, summary

HAZARD = """
========= Error: Potential {kind} hazard detected at __shared__ 0x{address:x} in block (0,2,0) :
=========     Write Thread (31,0,0) at {kernel}+0xaab0 in first.py:250
=========     Read Thread (64,0,0) at {kernel}+0xac40 in second.py:47
=========     Current Value : 0, Incoming Value : 2
"""


def report(*found: tuple[str, str], total: int | None = None) -> str:
    text = "".join(HAZARD.format(kind=kind, kernel=kernel, address=n) for n, (kernel, kind) in enumerate(found))
    total = len(found) if total is None else total
    return f"========= COMPUTE-SANITIZER\n{text}========= RACECHECK SUMMARY: {total} hazards displayed (1 errors)"


def failures(tool: str, text: str, status: int | None = 0) -> list[str]:
    return list(missed({"tool": tool, "case": "some", **summary(tool, status, text)}))


def test_equal_hazards_are_counted() -> None:
    found = summary("racecheck", 0, report(("_kda", "RAW"), ("_tail", "WAR"), ("_kda", "RAW")))
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
    assert not failures(tool, "========= ERROR SUMMARY: 0 errors")
    assert failures(tool, "========= Invalid\n========= ERROR SUMMARY: 1 error") == [f"some, {tool}: 1 errors"]
    more = "========= ERROR SUMMARY: 5 errors\n========= ERROR SUMMARY: 0 errors were not printed."
    assert failures(tool, more) == [f"some, {tool}: 5 errors"]


def test_any_hazard_is_missed() -> None:
    assert not failures("racecheck", report())
    for kernel, kind in (("_mla_hopper", "RAW"), ("_mla_hopper", "WAR"), ("_kda", "WAW")):
        (text,) = failures("racecheck", report((kernel, kind)))
        assert kind in text and kernel in text and "1 errors" in text
    two = report(("_mla_hopper", "RAW")).replace("64,0,0) at _mla_hopper", "64,0,0) at _kda")
    assert "_mla_hopper / _kda" in failures("racecheck", two)[0]


def test_only_a_hand_over_gets_a_barrier() -> None:
    """Between what is stored and a barrier of all threads right after it."""
    stores = "\tst.shared.v2.b32 \t[global_smem+222864], {0, 16843009};\n\tst.shared.b32 \t[global_smem+222872], 67240707;\n"
    ends = "\tbarrier.sync \t1;\n\tsetmaxnreg.dec.sync.aligned.u32 \t168;\n\tbarrier.sync \t1;\n"
    others = "\tst.shared.b32 \t[%r1], %r2;\n\tbar.sync \t0, 128;\n\tld.shared.b32 \t%r3, [%r1];\n\tbarrier.sync \t1;\n"
    assert settled(stores + ends + others) == stores + "\tbar.sync \t0, 128;\n" + ends + others


@pytest.mark.parametrize(
    "text, status",
    [
        ("stopped", None),
        ("========= ERROR SUMMARY: 0 errors", 1),
        ("========= Target application returned an error\n========= ERROR SUMMARY: 0 errors", 0),
        ("========= Internal Sanitizer Error\n========= RACECHECK SUMMARY: 0 hazards displayed", 0),
        (report(("_mla_hopper", "RAW"), total=6), 0),
        ("", 0),
    ],
)
def test_what_was_no_whole_run_is_missed(text: str, status: int | None) -> None:
    (line,) = failures("racecheck", text, status)
    assert line.startswith(f"some, racecheck: status {status}: ") and line.endswith(text[-300:])
