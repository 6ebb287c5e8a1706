# SPDX-License-Identifier: Apache-2.0
"""The limit of benchmarks/draft_cost.py, what it times, and what it expects."""

from __future__ import annotations

import pytest
import torch

import dcp_compile
from benchmarks.draft_cost import CONTEXTS, WINDOW, measure, missed, predicted_us, replays
from tests.models.k3_dspark.tiny_draft import draft_for
from tests.tiny_models import tiny_kimi_k3

DRAFTS = 3


def rows(windowed: float, whole: float = 9.0) -> list[dict]:
    """Rows whose draft takes so many times as long at the longest context as at the shortest."""
    times = {None: (100.0, 100.0 * whole), WINDOW: (400.0, 400.0 * windowed)}
    return [
        {"context": context, "window": window, "draft_us": micros}
        for window, pair in times.items() for context, micros in zip(CONTEXTS, pair)
    ]  # fmt: skip


def test_a_draft_with_a_window_may_take_little_longer_after_a_long_context() -> None:
    assert missed(rows(1.15)) == missed(rows(0.9)) == []
    assert missed(rows(1.16, whole=1.0)) == ["window 2048: 1.160 x the time of context 2048 at 131072, at most 1.15"]
    assert len(missed(rows(float("nan")))) == 1


@pytest.fixture(params=[None, 16], scope="module")
def model(request):
    attention = {"full_attn_layers": [1, 2], "kda_layers": []}
    target = tiny_kimi_k3(2, first_k_dense_replace=2, linear_attn_config=attention)
    config = dcp_compile.DCPConfig(
        block_size=4, max_batch_size=1, max_seq_len=64, num_speculative_tokens=DRAFTS, draft_window=request.param
    )
    return dcp_compile.optimize(target, config=config, draft=draft_for(target, (0, 1), 0))


def test_every_part_of_a_round_is_timed(model) -> None:
    draft, context = model._dcp.draft, 48
    micros = iter((1.25, 20.0, 300.0))
    results = []

    def timed(part) -> float:
        results.append((part(), part())[0])
        return next(micros)

    for cache in draft.caches:
        cache.zero_()
    row = measure(model, context, timed)
    assert row == {
        "context": context, "window": draft.window, "context_us": 1.2, "block_us": 20.0, "markov_us": 300.0,
        "draft_us": 321.2, "predicted_us": round(predicted_us(model, context), 1),
    }  # fmt: skip
    (_, (base, hidden), tokens), sizes = results, draft.model.config
    assert base.shape == (1, DRAFTS, sizes.vocab_size) and hidden.shape == (1, DRAFTS, sizes.hidden_size)
    assert torch.equal(tokens, draft.follow(torch.tensor([5]), base))
    for cache in draft.caches:  # the K + 1 rows before the context's end, and the block behind it
        assert int((cache != 0).any(dim=-1).sum()) == 2 * DRAFTS + 1
    assert model._dcp_engine.pages.available == model._dcp_engine.pages.total


def test_only_a_draft_without_a_window_is_expected_to_take_longer_after_more_context(model) -> None:
    assert (predicted_us(model, 40) > predicted_us(model, 20)) == (model._dcp.draft.window is None)
    assert predicted_us(model, 16) > predicted_us(model, 8)


def test_what_a_call_replays_is_timed_in_its_place(monkeypatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", done.append)

    def call() -> None:
        done.append("inputs")
        for graph in ("first", "second"):
            torch.cuda.CUDAGraph.replay(graph)

    found = replays(call)
    assert done == ["inputs", "first", "second"]
    found()
    assert done[3:] == ["first", "second"]

    alone = replays(lambda: done.append("alone"))
    alone()
    assert done[5:] == ["alone", "alone"]
