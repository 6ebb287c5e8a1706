# SPDX-License-Identifier: Apache-2.0
"""Prefixes planned on the host: the same tokens, with few plans, each of which is right whenever it is used."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dcp_compile import layout
from dcp_compile.errors import BackendError
from dcp_compile.runtime import planning
from dcp_compile.runtime.graphs import GraphRunner
from dcp_compile.runtime.planning import StandingPlan, Unplanned
from tests.backends.capabilities import NEED
from tests.backends.fake_flashinfer import BatchMLAPagedAttentionWrapper, install
from tests.distributed.drafting import check_greedy, check_window
from tests.runtime.reference import Reference, captured, decode_by_transformers, decode_greedily
from tests.runtime.speculation import decode_in_rounds, with_stale_prefixes

PAGE, RANKS, RANK = 4, 2, 1
NEED = dataclasses.replace(NEED, page_size=PAGE, dcp_size=RANKS, interleave=1)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> type[BatchMLAPagedAttentionWrapper]:
    """The backend on a CPU; tails take three committed tokens per rank."""
    install(monkeypatch)
    return BatchMLAPagedAttentionWrapper


@functools.cache
def reference() -> Reference:
    return decode_by_transformers(captured("deepseek_v3").model, [1, 8, 9, 30], steps=12, seed=7)


def test_tokens_and_logits_are_transformers(fresh_seed: int, flashinfer) -> None:
    expected = reference()
    engine = captured("deepseek_v3").engine(num_speculative_tokens=4, prefill_chunk=16, backend="flashinfer")
    steps, run = [], engine.step
    counted = dataclasses.replace(engine, step=lambda inputs: steps.append(1) or run(inputs))
    _, single, _ = flashinfer.made  # of the trial, of single steps and of verify steps
    single.plans.clear()
    assert decode_greedily(counted, expected).good
    assert engine.reads_lengths and not captured("deepseek_v3").engine(backend="torch").reads_lengths
    # One plan for each chunk of the prompts, which have other rows, then one every four tokens.
    assert len(steps) == 13 and len(single.plans) == 5
    assert [plan["lengths"] for plan in single.plans[2:]] == [[1, 8, 9, 30], [5, 12, 13, 34], [9, 16, 17, 38]]
    assert decode_in_rounds(engine, expected, fresh_seed).good
    assert decode_greedily(engine, expected.rows([2, 0])).good
    stale = with_stale_prefixes(engine, fresh_seed)
    assert decode_in_rounds(stale, expected, fresh_seed).good


def test_a_draft_block_sees_all_of_its_context(fresh_seed: int, flashinfer) -> None:
    """Rows of a block see one another: one call without a mask over the prefix serves them as it serves causal rows."""
    settings = {"backend": "flashinfer", "draft_backend": "flashinfer", "dcp_size": 1}
    assert check_window(seed=fresh_seed, windows=[None, 9], **settings) < 1e-9
    plans = len(flashinfer.made)
    found = check_greedy("tiny", fresh_seed, "dspark", [3], num_speculative_tokens=4, **settings)
    assert found["wrong_tokens"] == 0
    assert len(flashinfer.made) == plans + 5  # a trial per program kind, then step, verify and block


class Recorded:
    """A backend and a plan of its own that keeps what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[list, list, int]] = []

    def plan(self, need, scale, device, size) -> Recorded:
        return self

    def update(self, block_table: Tensor, prefix_bounds: Tensor, rows: int) -> None:
        self.calls.append((block_table.tolist(), prefix_bounds.tolist(), rows))


class Steps:
    """A standing plan of two ranks, seen from the second, and the steps it is asked to prepare."""

    def __init__(self, size: tuple[int, int, int] | None = None) -> None:
        self.backend = Recorded()
        self.plan = StandingPlan(self.backend, NEED, 0.1, torch.device("cpu"), (RANK, RANKS, 1), size)
        self.table = torch.arange(1, 25, dtype=torch.int32).view(3, 8)

    def __call__(self, lengths: list[int], rows: int = 1, table: Tensor | None = None) -> tuple[list[int], int]:
        """Prefix lengths of the step, and plans so far."""
        batch = len(lengths)
        inputs = {
            "positions": torch.tensor(lengths)[:, None] + torch.arange(rows),
            "prefix_lengths": torch.tensor(lengths),
            "block_table": self.table[:batch] if table is None else table[:batch],
        }
        prepared = self.plan.prepare(inputs)
        assert {**prepared, "prefix_lengths": None} == {**inputs, "prefix_lengths": None}
        return prepared["prefix_lengths"].tolist(), len(self.backend.calls)


def test_a_plan_is_kept_while_its_prefixes_are_committed_and_tails_short(monkeypatch) -> None:
    monkeypatch.setattr(planning, "LONGEST_TAIL", 3)
    step = Steps()
    assert step([20, 7, 1]) == ([20, 7, 1], 1)
    assert step.backend.calls == [(step.table.tolist(), [10, 3, 0], 1)]  # this rank's share of the tokens
    assert step([21, 7, 7]) == ([20, 7, 1], 1)
    assert step([26, 13, 7]) == ([20, 7, 1], 1)  # six tokens more: three on each rank
    assert step([26, 14, 7]) == ([26, 14, 7], 2)
    assert step([26, 14, 6]) == ([26, 14, 6], 3)  # a committed token fewer: another sequence
    assert step([26, 14, 6], rows=4) == ([26, 14, 6], 4)
    assert step([26, 14], rows=4) == ([26, 14], 5)


def test_a_plan_is_renewed_when_pages_of_a_prefix_change() -> None:
    step = Steps()
    assert step([20, 7, 1])[1] == 1
    table = step.table.clone()
    table[0, 3:], table[1, 1:], table[2, 0:] = 90, 91, 92  # behind the ends of the prefixes on this rank
    assert step([21, 8, 2], table=table) == ([20, 7, 1], 1)
    table[1, 0] = 93
    assert step([21, 8, 2], table=table) == ([21, 8, 2], 2)


def test_planned_lengths_are_kept_apart_from_buffers() -> None:
    step = Steps()
    lengths = torch.tensor([5, 6])
    inputs = {"positions": torch.zeros(2, 1), "prefix_lengths": lengths, "block_table": step.table[:2]}
    step.plan.prepare(inputs)
    lengths += 2
    assert step.plan.prepare(inputs)["prefix_lengths"].tolist() == [5, 6]


def test_fewer_requests_than_a_captured_step_holds_are_filled_up() -> None:
    step = Steps(size=(3, 1, 8))
    assert step([20, 7]) == ([20, 7], 1)
    assert step.backend.calls[0] == ([*step.table[:2].tolist(), [0] * 8], [10, 3, 0], 1)
    assert step([21]) == ([21], 2)  # the second prefix of the plan is no longer there
    assert step([22]) == ([21], 2)
    assert step([22, 0, 0]) == ([21, 0, 0], 2)


def test_a_step_is_planned_with_the_rows_of_its_graph() -> None:
    step = Steps(size=(3, 4, 8))
    assert step([20, 7], rows=1) == ([20, 7], 1)
    assert step([21, 8], rows=4) == ([20, 7], 1)
    assert [rows for *_, rows in step.backend.calls] == [4]


def test_every_prefix_that_is_used_is_right_for_random_steps(fresh_seed: int) -> None:
    generator = torch.Generator().manual_seed(fresh_seed)
    draw = lambda low, high: int(torch.randint(low, high + 1, (), generator=generator))  # noqa: E731
    step, lengths = Steps(), [0, 0, 0]
    for _ in range(300):
        if draw(0, 9) == 0:
            lengths[draw(0, 2)] = draw(0, 12)
            step.table = step.table[torch.randperm(3, generator=generator)]
        lengths = [min(length + draw(0, 5), 60) for length in lengths]
        used, plans = step(lengths, rows=draw(1, 2))
        table, bounds, _ = step.backend.calls[-1]
        assert all(0 <= length - prefix <= planning.LONGEST_TAIL * RANKS for length, prefix in zip(lengths, used))
        assert bounds == [layout.local_length(prefix, RANK, RANKS, 1) for prefix in used]
        for row, bound in enumerate(bounds):
            pages = -(-bound // PAGE)
            assert table[row][:pages] == step.table[row, :pages].tolist()
    assert plans < 300


class ReplayedRunner(GraphRunner):
    """A runner whose graphs are the program itself, run again on the buffers of its bucket under no plan at all."""

    def _capture(self, batch, rows, columns, pool):
        host = {
            "input_ids": torch.zeros(batch * rows, dtype=torch.int64),
            "positions": torch.full((batch, rows), -1),
            "prefix_lengths": torch.zeros(batch, dtype=torch.int64),
            "block_table": torch.zeros(batch, columns, dtype=torch.int32),
            "state_slots": torch.full((batch,), -1, dtype=torch.int32),
            "accepted": torch.zeros(batch, dtype=torch.int32),
        }
        plan = self._plans((batch, rows, columns))
        plan.prepare(host)
        bucket = SimpleNamespace(plan=plan, outputs=())

        def fill(inputs) -> None:
            for name, buffer in host.items():
                buffer.fill_(-1 if name in ("positions", "state_slots") else 0)
                value = inputs[name].view(len(inputs["positions"]), -1)
                buffer.view(batch, -1)[: len(value), : value.shape[1]].copy_(value)

        def replay() -> None:
            wanted = range(batch * rows) if self._all_rows else range(rows - 1, batch * rows, rows)
            positions = host["positions"].view(-1).clamp_min(0)
            with plan:
                rows_wanted = torch.tensor(list(wanted))
                bucket.outputs = self._program({**host, "row_positions": positions, "logit_rows": rows_wanted})

        bucket.staging, bucket.graph = SimpleNamespace(fill=fill), SimpleNamespace(replay=replay)
        return bucket


def test_a_bucket_has_one_plan_for_all_layers_and_replays(monkeypatch, fresh_seed: int, flashinfer) -> None:
    """Batches of several sizes go through one bucket of four, whose wrapper keeps its buffers."""
    from dcp_compile import compiler

    expected = reference()
    need = lambda *given: dataclasses.replace(requirements(*given), cuda_graphs=True)  # noqa: E731
    requirements = compiler._requirements
    monkeypatch.setattr(compiler, "_requirements", need)
    monkeypatch.setattr(compiler, "GraphRunner", ReplayedRunner)
    monkeypatch.setattr(compiler, "buckets", lambda most: [most])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    engine = captured("deepseek_v3").engine(prefill_chunk=16, backend="flashinfer")
    trial, direct, bucket = flashinfer.made
    addresses = [buffer.data_ptr() for buffer in bucket.buffers]
    for rows in ([0, 1, 2, 3], [3, 1], [2], [0, 2, 3]):
        assert decode_greedily(engine, expected.rows(rows)).good
    assert bucket.captured and addresses == [buffer.data_ptr() for buffer in bucket.buffers]
    assert all(plan["rows"] == 1 and len(plan["lengths"]) == 4 for plan in bucket.plans)
    assert len(bucket.plans) < 4 * 11 / 2 and len(direct.plans) > 4  # decode steps of four runs; chunks of prompts
    assert len(trial.plans) == 1

    verified = captured("deepseek_v3").engine(num_speculative_tokens=4, prefill_chunk=16, backend="flashinfer")
    assert decode_in_rounds(verified, expected, fresh_seed).good  # of up to five rows, in graphs of five
    bucket = flashinfer.made[-1]
    assert bucket.captured and bucket.plans and all(plan["rows"] == 5 for plan in bucket.plans)


def test_what_cannot_be_planned_shows_at_once(flashinfer) -> None:
    step = captured("deepseek_v3")
    with pytest.raises(BackendError, match="decode layout flattened not supported \\(supported: split\\)"):
        step.engine(backend="flashinfer", decode_layout="flattened")
    # 600 rows x 4 heads are 19 tiles of 128.
    with pytest.raises(BackendError, match="at most 16128 tiles .* 2048 requests x 600 rows x 4 heads has 38912: lower"):
        step.engine(backend="flashinfer", prefill_chunk=600, max_batch_size=2048, max_seq_len=16)


def test_layers_with_scales_of_their_own_share_no_plan(monkeypatch, flashinfer) -> None:
    from dcp_compile import compiler

    matched = compiler._matched

    def other_scale(*given):
        graph, *rest = matched(*given)
        graph.sites[-1] = dataclasses.replace(graph.sites[-1], scale=0.25)
        return graph, *rest

    monkeypatch.setattr(compiler, "_matched", other_scale)
    with pytest.raises(BackendError, match="has 2 different scales .*choose another backend"):
        captured("deepseek_v3").engine(backend="flashinfer")


def test_a_plan_free_program_takes_its_inputs_as_they_are() -> None:
    inputs = {"prefix_lengths": torch.tensor([3])}
    with Unplanned((1, 2, 3)) as plan:
        assert plan.prepare(inputs) is inputs
