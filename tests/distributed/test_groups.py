# SPDX-License-Identifier: Apache-2.0
"""Which ranks work together: DCP groups are consecutive ranks of one tensor-parallel group, replicas are independent."""

from __future__ import annotations

import pytest
import torch

from dcp_compile import DCPConfig
from dcp_compile.errors import ConfigError
from dcp_compile.parallel import ParallelLayout, parallel_layout
from tests.distributed.scripts import run_scenarios


@pytest.fixture(scope="module")
def scenarios() -> dict[str, list]:
    return run_scenarios("groups", "heads_over_four_ranks", "heads_that_do_not_divide", "float8_cache")


def blocks(size: int) -> list[list[int] | None]:
    """Group of each of four ranks when groups are ``size`` consecutive ranks."""
    return [list(range(rank // size * size, rank // size * size + size)) if size > 1 else None for rank in range(4)]


def test_places_of_four_ranks(scenarios: dict[str, list]) -> None:
    reports = scenarios["groups"]
    for tp, dcp in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 2), (4, 4)):
        size = max(tp, dcp)
        for rank, report in enumerate(reports):
            leader = rank // size * size if size > 1 else 0
            assert report[f"tp {tp}, dcp {dcp}"] == [
                rank % tp, rank % dcp, blocks(tp)[rank], blocks(dcp)[rank], blocks(size)[rank],
                leader, size == 1 or rank == leader, rank if size == 1 else leader, tp > 1,
            ]  # fmt: skip
    for report in reports:
        assert report["tp 4, any dcp"] == report["tp 4, dcp 4"]
        for sizes, needed in (("tp 1, dcp 3", 3), ("tp 8, dcp 2", 8)):
            assert report[sizes]["error"] == "ConfigError"
            assert f"need a multiple of {needed} ranks, but 4 are running" in report[sizes]["text"]
            assert f"torchrun --nproc-per-node {needed}" in report[sizes]["text"]


def test_generate_with_sharded_heads_and_back(scenarios: dict[str, list]) -> None:
    """Four ranks of one head each, two groups that share the tokens between two of them."""
    assert scenarios["heads_over_four_ranks"] == [{"same": True, "restored": True, "after": True}] * 4


def test_two_ranks_share_a_float8_cache(scenarios: dict[str, list]) -> None:
    """Chunked prefill and verify steps; float32 rounding may tip a latent over to the next float8."""
    for errors in scenarios["float8_cache"]:
        assert 1e-3 < errors["exact"] < 5e-2
        assert max(errors["split"], errors["flattened"]) < 0.2 * errors["exact"]


def test_heads_that_cannot_be_sharded(scenarios: dict[str, list]) -> None:
    for odd_heads, no_table in scenarios["heads_that_do_not_divide"]:
        assert odd_heads["error"] == "ConfigError" and no_table["error"] == "UnsupportedModelError"
        assert "layers.0.self_attn.q_b_proj.weight [72, 24]: num_attention_heads=3" in odd_heads["text"]
        assert "does not divide over tp_size=2 ranks; choose a tp_size that divides 3" in odd_heads["text"]
        assert "has no sharding_plan for all of its attention layers" in no_table["text"]
        assert odd_heads["unchanged"] and no_table["unchanged"]


def test_one_process_alone() -> None:
    alone = parallel_layout(DCPConfig(), torch.device("cpu"))
    assert alone == ParallelLayout() and alone.is_leader and not alone.heads_sharded
    given = torch.tensor([3])
    assert alone.broadcast(given) is given


@pytest.mark.parametrize("sizes", [{"dcp_size": 2}, {"tp_size": 2}, {"tp_size": 2, "dcp_size": 1}])
def test_one_process_cannot_be_two_ranks(sizes: dict[str, int], monkeypatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    message = "2 ranks are needed but this program runs as one process; start it with torchrun --nproc-per-node 2"
    with pytest.raises(ConfigError, match=message):
        parallel_layout(DCPConfig(**sizes), torch.device("cpu"))
    assert not torch.distributed.is_initialized()


def test_too_few_ranks_are_counted(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="3 ranks are needed but 2 are running; start it with torchrun --nproc-per-node 3"):
        parallel_layout(DCPConfig(dcp_size=3), torch.device("cpu"))
    assert not torch.distributed.is_initialized()
