# SPDX-License-Identifier: Apache-2.0
"""The thresholds of benchmarks/mla_decode.py: every one can be missed, and a result at all of them misses none."""

from __future__ import annotations

import pytest

from benchmarks.mla_decode import CASES, LEAST_FRACTION, LEAST_GAIN_OVER_ROWS, MOST_MICROSECONDS, missed

GOOD = {
    "batch": 1, "context": 131072, "rows": 8, "roofline_us": 277.3, "hopper_error": 1e-3, "best_us": 340.0,
    "flashinfer_us": 340.0, "flashinfer_rows_us": 480.0,
}  # fmt: skip


def test_a_result_at_all_thresholds_misses_none() -> None:
    assert list(missed(GOOD)) == []
    assert {*LEAST_FRACTION, *MOST_MICROSECONDS, *LEAST_GAIN_OVER_ROWS} <= set(CASES)


@pytest.mark.parametrize("change, text", [
    ({"hopper_error": float("nan")}, "hopper_error nan, at most 0.01"),
    ({"roofline_us": 270.0}, "0.794 of the roofline, at least 0.8"),
    ({"flashinfer_us": 330.0}, "1.03 x the time of FlashInfer's compact call, at most 1.02"),
    ({"flashinfer_rows_us": 470.0}, "1.38 times as fast as flattened rows, at least 1.4"),
    ({"context": 4096, "rows": 1, "best_us": 13.1}, "13.1 us, at most 13.0"),
    ({"longest_alone_us": 309.0}, "340.0 us, at most 1.1 x 309.0 us of the longest request alone"),
])  # fmt: skip
def test_each_threshold_is_named_when_it_is_missed(change: dict, text: str) -> None:
    assert list(missed({**GOOD, **change})) == [text]
