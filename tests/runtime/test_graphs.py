# SPDX-License-Identifier: Apache-2.0
"""CUDA graph replay: the same tokens as without graphs, state untouched by warm-up, nothing freed that a graph reads."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

import dcp_compile
from dcp_compile.runtime.graphs import GraphRunner, ReplayedCall, _place, buckets, smallest_bucket
from dcp_compile.runtime.planning import Unplanned
from tests.generation.helpers import fresh_seeds
from tests.models.k3_dspark.tiny_draft import draft_for
from tests.runtime.reference import calm_kimi_k3, decode_by_transformers, outcome
from tests.tiny_models import tiny_kimi_k3

SETTINGS = {"block_size": 16, "max_batch_size": 3, "max_seq_len": 128, "num_speculative_tokens": 3}


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])])
def test_buckets_reach_the_largest_batch(most, sizes):
    assert buckets(most) == sizes


@pytest.mark.parametrize(("batch", "rows", "place"), [
    (1, 1, (1, 1)), (1, 2, (1, 2)), (1, 3, (1, 5)), (2, 1, (3, 1)), (3, 5, (3, 5)), (3, 6, None), (4, 1, None),
])  # fmt: skip
def test_a_step_takes_the_smallest_graph_that_holds_it(batch, rows, place):
    places = [(batch, rows) for batch in (3, 1) for rows in (5, 2, 1)]
    assert smallest_bucket(places, batch, rows) == place
    assert smallest_bucket(places[::-1], batch, rows) == place


def test_what_inputs_leave_free_of_their_buffers_becomes_neutral():
    buffers = {
        "input_ids": torch.full((6,), 9), "positions": torch.full((2, 3), 9), "prefix_lengths": torch.full((2,), 9),
        "block_table": torch.full((2, 4), 9), "state_slots": torch.full((2,), 9), "accepted": torch.full((2,), 9),
    }  # fmt: skip
    inputs = {
        "input_ids": torch.tensor([5, 6]), "positions": torch.tensor([[3, 4]]), "prefix_lengths": torch.tensor([3]),
        "block_table": torch.tensor([[7, 8, 0, 0]]), "state_slots": torch.tensor([1]), "accepted": torch.tensor([2]),
        "row_positions": torch.tensor([3, 4]),
    }  # fmt: skip
    _place(inputs, buffers)
    assert {name: buffer.tolist() for name, buffer in buffers.items()} == {
        "input_ids": [5, 6, 0, 0, 0, 0], "positions": [[3, 4, -1], [-1, -1, -1]], "prefix_lengths": [3, 0],
        "block_table": [[7, 8, 0, 0], [0, 0, 0, 0]], "state_slots": [1, -1], "accepted": [2, 0],
    }  # fmt: skip
    full = {name: torch.arange(buffer.numel()).view(buffer.shape) for name, buffer in buffers.items()}
    _place(full, buffers)
    assert all(torch.equal(buffers[name], value) for name, value in full.items())
    _place({}, buffers)
    assert all((buffer == (-1 if name in ("positions", "state_slots") else 0)).all() for name, buffer in buffers.items())


class RecordedRunner(GraphRunner):
    """Buckets that run the program on their padded inputs: all of a runner but the capture itself."""

    def _capture(self, batch, rows, columns, pool):
        self.captured = [*getattr(self, "captured", []), (batch, rows)]
        outputs = torch.arange(batch * rows)[:, None].expand(-1, 2)
        return SimpleNamespace(
            staging=SimpleNamespace(fill=lambda inputs: None), plan=Unplanned(), outputs=(outputs,),
            graph=SimpleNamespace(replay=lambda: self.replayed.append((batch, rows))),
        )  # fmt: skip

    replayed: list = []


def test_a_runner_has_one_graph_per_batch_and_width_and_cuts_its_padding():
    direct = []
    runner = RecordedRunner(direct.append, [1, 4], [1, 2], 3, True, torch.device("cpu"), (0, 0))
    assert runner.captured == [(2, 4), (2, 1), (1, 4), (1, 1)]
    (out,) = runner({"positions": torch.zeros(2, 3)})
    assert out[:, 0].tolist() == [0, 1, 2, 4, 5, 6]  # rows 3 and 7 are padding
    (out,) = runner({"positions": torch.zeros(1, 1)})
    assert out[:, 0].tolist() == [0] and runner.replayed == [(2, 4), (1, 1)] and not direct
    runner({"positions": torch.zeros(2, 5)})
    assert len(direct) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU to capture graphs")
def test_replays_equal_transformers_and_survive_reused_memory():
    """Tokens and logits are those of transformers on the CPU: on a GPU its chunked delta rule rounds to tf32."""
    plain = calm_kimi_k3()
    plain.generation_config.eos_token_id = None
    steps = 12
    reference = decode_by_transformers(plain, [9, 9, 9], steps, seed=fresh_seeds("graphs", 1)[0])
    draft = draft_for(plain).cuda()
    model = dcp_compile.optimize(copy.deepcopy(plain).cuda(), config=dcp_compile.DCPConfig(**SETTINGS), draft=draft)
    states = model._dcp_engine.states
    assert all(not tensor.any() for tensor in states.values()), "warm-up and capture must leave no trace"
    for batch in (1, 2, 3):
        ids = torch.stack(reference.prompts[:batch]).cuda()
        options = {"max_new_tokens": steps, "do_sample": False, "pad_token_id": 0}
        options |= {"return_dict_in_generate": True, "output_logits": True}
        junk = [torch.full((1 << 16,), 1 << 40, device="cuda") for _ in range(64)]
        for speculation in ({}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": draft}):
            found = model.generate(ids, **options, **speculation)
            logits = torch.stack(found.logits, dim=1).cpu()
            result = outcome(found.sequences[:, -steps:].cpu(), logits, reference.rows(range(batch)))
            assert result.good, (batch, speculation.keys(), result)
        del junk


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU to capture graphs")
def test_a_replay_does_not_wait_for_the_device():
    model = dcp_compile.optimize(tiny_kimi_k3(layers=5).cuda(), config=dcp_compile.DCPConfig(**SETTINGS))
    engine = model._dcp_engine
    bucket = engine.step.bucket(1, 1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            bucket.graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU to capture graphs")
def test_a_replayed_call_pads_smaller_inputs_with_what_is_neutral():
    written = torch.zeros(8, device="cuda", dtype=torch.int64)

    def add_up(values, places):
        kept = places >= 0
        written.index_add_(0, places.clamp_min(0).flatten(), torch.where(kept, values, 0).flatten())
        return torch.where(kept, values, 0).sum(dim=1)

    def inputs(batch, rows):
        return [((batch, rows), torch.int64, 99), ((batch, rows), torch.int64, -1)]

    pool = torch.cuda.graph_pool_handle()
    call = ReplayedCall(add_up, [(1, 2), (3, 2)], inputs, torch.device("cuda"), pool)
    assert not written.any() and call.holds(3, 2) and not call.holds(3, 3) and not call.holds(4, 1)
    for batch, rows in ((3, 2), (2, 1), (1, 1), (1, 2)):
        written.zero_()
        values, places = torch.randint(1, 50, (batch, rows)), torch.randint(-1, 8, (batch, rows))
        got = call((batch, rows), values, places)
        want = torch.where(places >= 0, values, 0)
        assert got.tolist() == want.sum(dim=1).tolist()
        wanted = torch.zeros(8, dtype=torch.int64).index_add(0, places.clamp_min(0).flatten(), want.flatten())
        assert written.tolist() == wanted.tolist()
