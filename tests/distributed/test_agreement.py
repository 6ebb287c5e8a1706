# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold different models, settings or prompts all refuse, name the rank and what differs, and change nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dcp_compile.parallel.agreement import check_agreement, prompts_fingerprint, weights_fingerprint
from tests.distributed.scripts import run_scenarios


@pytest.fixture(scope="module")
def reports() -> dict[str, list]:
    return run_scenarios(
        "other_weights", "weights_that_lie_otherwise", "other_configurations", "other_settings", "other_sizes", "other_prompts",
        "other_options",
    )


def assert_all_refuse(reports: list[dict], rank: int, field: str) -> None:
    for report in reports:
        assert report["error"] == "RankError"
        assert report["text"].startswith(f"rank {rank} disagrees with rank 0 on {field}: ")
        assert report.get("unchanged", True)


def test_other_weights_or_another_model(reports: dict[str, list]) -> None:
    fields = ("weights", "weights", "model config.num_hidden_layers", "model class")
    for case, field in zip(zip(*reports["other_weights"], strict=True), fields, strict=True):
        assert_all_refuse(case, 1, field)


def test_graphs_that_differ_though_weights_and_settings_agree(reports: dict[str, list]) -> None:
    """Found out before any program is compiled, or run with collectives that the other ranks do not join."""
    for name, field in (("target", "graph"), ("draft", "draft's graph")):
        found = [report[name] for report in reports["weights_that_lie_otherwise"]]
        assert_all_refuse(found, 1, field)
        assert all("lie differently in memory" in report["text"] for report in found)
    assert all(report["unchanged"] for report in reports["weights_that_lie_otherwise"])


def test_other_configurations(reports: dict[str, list]) -> None:
    """What weights do not show, and in part no graph: the length of a draft's block, the layers that it reads."""
    fields = {
        "model": "model config.routed_scaling_factor",
        "one draft": "draft",
        "draft, early": "draft's model config.block_size",
        "draft, late": "draft's model config.target_layer_ids",
    }
    for name, field in fields.items():
        assert_all_refuse([report[name] for report in reports["other_configurations"]], 1, field)
    for report in reports["other_configurations"]:
        assert report["another call"]["error"] == "RankError"
        assert "all ranks must make the same calls in the same order" in report["another call"]["text"]
        assert report["unchanged"]


def test_other_settings(reports: dict[str, list]) -> None:
    first, second = reports["other_settings"]
    assert len(first) == 8
    for name in first:
        assert_all_refuse([first[name], second[name]], 1, f"config.{name}")


def test_other_sizes_of_groups(reports: dict[str, list]) -> None:
    """Found out before ranks wait for groups that the others never form."""
    assert_all_refuse([report["dcp_size"] for report in reports["other_sizes"]], 2, "dcp_size")
    assert_all_refuse([report["tp_size"] for report in reports["other_sizes"]], 3, "tp_size")


def test_other_prompts(reports: dict[str, list]) -> None:
    """The pages of refused calls are free again: a later call that needs all of them runs."""
    ids, lengths, rows, same = zip(*reports["other_prompts"], strict=True)
    assert_all_refuse(ids, 1, "prompt ids")
    assert_all_refuse(lengths, 1, "prompt lengths")
    assert_all_refuse(rows, 1, "prompt lengths")
    assert [report["error"] for report in same] == [None, None]


def test_other_options_of_a_call(reports: dict[str, list]) -> None:
    """What decides how many steps a rank runs, and which."""
    *cases, same = zip(*reports["other_options"], strict=True)
    fields = (
        "max_length", "eos_token_id", "do_sample", "criteria that do more than compare tokens", "output_scores or output_logits",
        None, "processors that read tokens",
    )  # fmt: skip
    for case, field in zip(cases, fields, strict=True):
        if field is not None:
            assert_all_refuse(case, 1, field)
    for report in cases[fields.index(None)]:  # drafts on one rank only
        assert report["error"] == "RankError" and "rank 1 compares prompt lengths and" in report["text"]
    assert [report["error"] for report in same] == [None, None]


def test_one_rank_agrees_with_itself() -> None:
    check_agreement(None, {"anything": 1})


def test_the_fingerprint_sees_every_value_name_and_type() -> None:
    def model(change=lambda m: None) -> nn.Module:
        torch.manual_seed(0)
        built = nn.Sequential(nn.Linear(50, 40), nn.BatchNorm1d(40))
        with torch.no_grad():
            change(built)
        return built

    def swap(m: nn.Module) -> None:
        m[0].weight[[0, 30]] = m[0].weight[[30, 0]]

    changes = [
        lambda m: m[0].weight.view(-1)[1234].mul_(1 + 1e-6),
        lambda m: m[1].running_mean[7].add_(1e-3),
        lambda m: m[0].weight.neg_(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.add_module("2", nn.Linear(0, 3)),
        swap,
    ]
    prints = [weights_fingerprint(model())] + [weights_fingerprint(model(change)) for change in changes]
    assert len(set(prints)) == len(prints)
    assert weights_fingerprint(model()) == prints[0]


@pytest.mark.parametrize("other", [[[3, 4], [5]], [[3], [4, 5]], [[3, 4, 5]], [[3, 4, 6]], []])
def test_prompts_differ_by_ids_and_by_where_they_end(other: list[list[int]]) -> None:
    def fingerprint(prompts: list[list[int]]) -> dict:
        return prompts_fingerprint([torch.tensor(prompt) for prompt in prompts])

    assert fingerprint(other) == fingerprint(other)
    assert fingerprint(other) != fingerprint([[3, 4, 5], []])
