# SPDX-License-Identifier: Apache-2.0
"""A draft that sees a window of its context: nothing else, at no other cost. On several ranks: see test_drafting.py."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from dcp_compile import DCPConfig, backends
from dcp_compile.capture import capture
from dcp_compile.compiler import DraftStep, compile_block
from dcp_compile.errors import BackendError
from dcp_compile.ops.mla import attend_tail
from dcp_compile.parallel import ParallelLayout
from dcp_compile.passes.graph_tools import METADATA, census, dcp, nodes_of
from tests.distributed.drafting import check_window
from tests.models.k3_dspark.tiny_draft import target_heads, tiny_draft


@pytest.mark.parametrize("layout", ["split", "flattened"])
def test_blocks_see_the_window_and_themselves(layout: str, fresh_seed: int) -> None:
    """Contexts of 1, 7 and 26 tokens in pages of 4; windows of 1, within a page, across pages, and past all of them."""
    windows = [1, 3, 4, 9, 26, 40, None]
    assert check_window(seed=fresh_seed, windows=windows, dcp_size=1, decode_layout=layout) < 1e-9


def test_blocks_read_a_float8_context_by_its_scale(fresh_seed: int) -> None:
    """A power of two changes no rounding, so the error stays; a context written with another scale than it is read with
    would make it several times larger."""
    unscaled, scaled = (
        check_window(seed=fresh_seed, windows=[9, None], dcp_size=1, kv_cache_dtype="float8_e4m3fn", kv_cache_scale=scale)
        for scale in (1.0, 2.0**-3)
    )
    assert unscaled > 1e-3
    assert scaled == pytest.approx(unscaled, rel=0.1)


def compiled(**settings):
    draft = tiny_draft(0)
    captured = capture(DraftStep(draft, *target_heads(draft, 0)), ("hidden_states",))
    engine = SimpleNamespace(
        config=DCPConfig(block_size=4, max_batch_size=2, max_seq_len=32, draft_window=5, **settings),
        parallel=ParallelLayout(), device=torch.device("cpu"),
    )  # fmt: skip
    return captured, draft, engine


def test_one_attention_call_per_layer_and_one_prologue(monkeypatch) -> None:
    captured, draft, engine = compiled()
    block, report = compile_block(captured, draft, engine)
    assert (block.window, report.layout) == (5, "tail")
    calls = census(report.graph.graph)
    names = ("mla_tail", "mla_prefix", "mla_rows", "merge_partials")
    assert [calls[f"dcp::{name}"] for name in names] == [2, 0, 0, 0]
    assert [node.args[-1] for node in nodes_of(report.graph.graph, dcp.mla_tail.default)] == [5, 5]  # keys at most
    assert nodes_of(report.graph.graph, *METADATA) == []
    (fused,) = nodes_of(report.graph.prologue.graph, *METADATA)
    assert fused.target is dcp.block_metadata.default

    torch_backend = backends.get_backend("torch")
    flattened = dataclasses.replace(torch_backend.capabilities, layouts=("flattened",))
    monkeypatch.setattr(type(torch_backend), "capabilities", flattened)
    with pytest.raises(BackendError, match="draft_window needs the tail call .* which the torch backend lacks"):
        compile_block(captured, draft, engine)


def test_pages_before_the_window_are_not_touched() -> None:
    """Their entries in the block table lead nowhere, and a page that straddles the border holds NaN up to it."""
    cache = torch.randn(4, 4, 12)
    cache[2, :3] = torch.nan
    table = torch.tensor([[10**6, 10**6, 2, 3]], dtype=torch.int32)
    query = torch.randn(2, 3, 8), torch.randn(2, 3, 4)
    requests, first, bounds = (torch.tensor(v, dtype=torch.int32) for v in ([0, 0], [11], [14, 14]))
    out, lse = attend_tail(*query, cache, table, requests, first, bounds, 0.3)
    keys = torch.cat([cache[2, 3:], cache[3, :2]])
    scores = torch.einsum("thd,kd->thk", torch.cat(query, dim=-1), keys) * 0.3
    torch.testing.assert_close(out, torch.einsum("thk,kd->thd", scores.softmax(-1), keys[:, :8]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
