# SPDX-License-Identifier: Apache-2.0
"""The oracle itself: prompts whose greedy continuation would hang on rounding are replaced."""

from __future__ import annotations

import torch

from tests.runtime import reference
from tests.runtime.reference import MODELS, _Choices, decode_by_transformers


def scores(*gaps: float) -> torch.Tensor:
    """``[tokens, 4]`` scores whose second and third best are that far apart."""
    return torch.stack([torch.tensor([0.25, 0.9, 0.25 + gap, 0.1]) for gap in gaps])


def test_the_least_gap_of_every_row_is_that_of_its_tokens():
    with _Choices(lengths=[3, 1]) as choices:
        scores(0.5, 0.125, 0.25, 0.0, 0.0, 0.375).topk(2)  # a prefill: the second row is padded twice
        assert choices.least_gap.tolist() == [0.125, 0.375]
        torch.topk(scores(0.0625, 0.5), k=2, dim=-1, sorted=False)  # a step
        assert choices.least_gap.tolist() == [0.0625, 0.375]
        scores(0.0, 0.0).topk(4)  # takes all there are
        torch.full((2, 4), -torch.inf).topk(2)  # all masked
        assert choices.least_gap.tolist() == [0.0625, 0.375]
        scores(0.5, 0.0).topk(2)
        assert choices.least_gap.tolist() == [0.0625, 0.0]


_ROUNDING = 3e-5  # of a router's scores, between batches of other prompts


def test_a_prompt_with_a_tie_in_a_router_is_replaced(fresh_seed, monkeypatch):
    monkeypatch.setattr(reference, "_CLEAR", 0.0)  # no prompt is replaced for its tokens
    model, lengths = MODELS["kimi_k3"](), [2, 3, 4, 5, 6, 7]

    def prompts(clear: float) -> list[torch.Tensor]:
        monkeypatch.setattr(reference, "_CLEAR_CHOICE", clear)
        return decode_by_transformers(model, lengths, steps=2, seed=fresh_seed).prompts

    def gaps(given: list[torch.Tensor]) -> torch.Tensor:
        with _Choices(lengths) as choices:
            reference._generate(model, given, steps=2)
        return choices.least_gap

    first = prompts(0.0)
    border = float(gaps(first).median())  # half of the prompts are at most that clear
    second = prompts(border + _ROUNDING)
    assert (gaps(second) > border).all()
    kept = [torch.equal(one, other) for one, other in zip(first, second)]
    assert kept == (gaps(first) > border + _ROUNDING).tolist()
