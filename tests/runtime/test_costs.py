# SPDX-License-Identifier: Apache-2.0
"""Times of steps are measured once, for the buckets that exist, and leave the engine as new."""

from __future__ import annotations

from types import SimpleNamespace

from dcp_compile.runtime import costs
from tests.runtime.reference import captured, decode_by_transformers
from tests.runtime.speculation import decode_in_rounds


def test_every_bucket_is_measured_and_nothing_stays_taken(fresh_seed: int) -> None:
    source = captured("kimi_linear")
    assert source.engine(num_speculative_tokens=4).verify_costs is None
    assert source.engine(verify="adaptive").verify_costs is None  # nothing to verify
    engine = source.engine(verify="adaptive", num_speculative_tokens=4, max_batch_size=3)
    table = engine.verify_costs.table
    assert {requests: list(points) for requests, points in table.items()} == {
        1: [1, 2, 4, 5], 2: [2, 4, 8, 10], 3: [3, 6, 12, 15],
    }  # fmt: skip
    for points in table.values():
        times = list(points.values())
        assert times[0] > 0 and times == sorted(times)
    assert engine.pages.available == engine.pages.total and engine.slots.available == engine.slots.total
    assert engine.verify_steps == 0
    expected = decode_by_transformers(source.model, [1, 9, 12], steps=10, seed=fresh_seed)
    assert decode_in_rounds(engine, expected, fresh_seed).good  # what was measured left no trace


def test_more_rows_never_count_as_cheaper(monkeypatch) -> None:
    falling = iter(range(1000, 0, -1))
    monkeypatch.setattr(costs, "_median_seconds", lambda step, parallel, device: float(next(falling)))
    engine = captured("kimi_linear").engine(verify="adaptive", num_speculative_tokens=1, max_batch_size=2)
    assert engine.verify_costs.table == {1: {1: 1000.0, 2: 1000.0}, 2: {2: 998.0, 4: 998.0}}
    assert engine.verify_costs.seconds(2, 3) == 998.0


def test_blocks_are_measured_with_tables_as_wide_as_sessions_have_them(monkeypatch) -> None:
    """Graphs of blocks take tables of one width only."""
    engine = captured("kimi_linear").engine(max_batch_size=3)
    shapes = []
    draft = SimpleNamespace(width=4, parallel=engine.parallel)
    draft.run_block = lambda anchors, lengths, table, counts, width: shapes.append((table.shape, counts.tolist()))
    table = costs.measure_blocks(draft, engine).table
    with engine.open(1, 20) as session:
        assert {shape[1] for shape, _ in shapes} == {session.block_table.shape[1]} and engine.columns > 1
    assert {shape[0]: counts for shape, counts in shapes} == {1: [4], 2: [4] * 2, 3: [4] * 3}
    assert {requests: list(points) for requests, points in table.items()} == {1: [4], 2: [8], 3: [12]}
