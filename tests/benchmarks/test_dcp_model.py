# SPDX-License-Identifier: Apache-2.0
"""The cost model of many GPUs: it finds the lines it is fitted to, and halves what ranks share."""

from __future__ import annotations

import random

import pytest

from benchmarks.dcp_model import CONTEXTS, HEADS, HOST, Model, line, message_bytes

RATES = {1: (15.0, 5e-4), 8: (40.0, 2e-3)}  # microseconds, and per key


def measured(latency: float, per_byte: float) -> dict[str, list[dict]]:
    attention = [
        {"gpus": size, "context": context, "rows": rows, "heads": heads, "us": offset + slope * context / size * heads}
        for size in (1, 2) for context in CONTEXTS for rows, (offset, slope) in RATES.items() for heads in (HEADS, HEADS // 2)
    ]  # fmt: skip
    exchange = [
        {"gpus": 2, "rows": rows, "heads": heads, "peers_us": latency + per_byte * message_bytes(rows, 2) * (heads == "sharded")}
        for rows in (1, 8, 64) for heads in ("sharded", "replicated")
    ]  # fmt: skip
    return {"attention": attention, "exchange": exchange}


def test_a_line_through_points_of_a_line() -> None:
    offset, slope = random.uniform(0, 5), random.uniform(0.1, 5)
    assert line([(x, offset + slope * x) for x in (1.0, 7.0, 30.0)]) == pytest.approx((offset, slope))


def test_no_time_is_negative() -> None:
    """A long context that came out too slow must not make short ones take less than nothing."""
    offset, slope = line([(1.0, 1.0), (4.0, 4.0), (8.0, 9.0)])
    assert offset == 0 and 1 < slope < 9 / 8


def test_what_counts_are_relative_errors() -> None:
    """Two microseconds of ten weigh more than two of a thousand."""
    offset, slope = line([(0.0, 10.0), (1.0, 20.0), (99.0, 1002.0)])
    assert offset == pytest.approx(10, rel=1e-2) and slope == pytest.approx(10, rel=1e-2)


@pytest.mark.parametrize("rows", [1, 8])
def test_attention_is_that_of_a_ranks_keys(rows: int) -> None:
    model, (offset, slope) = Model(measured(9.0, 1e-6)), RATES[rows]
    for size in (1, 2, 8):
        assert model.attention_us(10**6, rows, size) == pytest.approx(offset + slope * HEADS * 10**6 / size)


def test_an_exchange_is_a_latency_and_bytes_and_more_between_hosts() -> None:
    model = Model(measured(9.0, 1e-6))
    assert model.exchange_us(8, 1) == 0
    assert model.exchange_us(8, 4) == pytest.approx(9.0 + 1e-6 * message_bytes(8, 4))
    assert model.exchange_us(8, 2 * HOST) > model.exchange_us(8, HOST) + 40


def test_ranks_send_every_other_rank_its_heads_only() -> None:
    assert message_bytes(1, 2) == 48 * (576 + 512) * 2 + 48 * 4
    assert message_bytes(3, 8) == 3 * 7 * 12 * ((576 + 512) * 2 + 4)
