# SPDX-License-Identifier: Apache-2.0
"""Merging partials: exactness, empty parts with garbage in them, bases, and the packed message."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_compile.ops.merge import merge_partials, pack_partials
from tests.cases import between, examples, generators, normal

dcp = torch.ops.dcp
NAN, INF = math.nan, math.inf


def softmax_parts(generator: torch.Generator, sizes: list[int], rows: int, heads: int, width: int):
    """Partials over disjoint sets of keys, an empty one full of NaN, and the result over all keys at once."""
    scores = [3 * normal(generator, rows, heads, size) for size in sizes]
    values = [normal(generator, size, width) for size in sizes]
    outs, lses = [], []
    for score, value in zip(scores, values):
        empty = score.shape[-1] == 0
        outs.append(torch.full((rows, heads, width), NAN, dtype=torch.float64) if empty else score.softmax(-1) @ value)
        lses.append(score.logsumexp(-1) if not empty else torch.full((rows, heads), -INF, dtype=torch.float64))
    every = torch.cat(scores, -1)
    if every.shape[-1] == 0:
        return outs, lses, torch.zeros(rows, heads, width, dtype=torch.float64), lses[0]
    return outs, lses, every.softmax(-1) @ torch.cat(values), every.logsumexp(-1)


@examples(80)
@given(
    generator=generators(),
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    base=st.sampled_from([2.0, math.e]),
)
def test_equals_one_softmax_over_all_keys(generator, sizes: list[int], base: float) -> None:
    rows, heads, width = (between(generator, 0, 3) for _ in range(3))
    outs, lses, wanted, wanted_lse = softmax_parts(generator, sizes, rows, heads, width)
    out, lse = merge_partials(torch.stack(outs), torch.stack(lses) / math.log(base), base)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse * math.log(base), wanted_lse, rtol=1e-12, atol=1e-12)
    if base == math.e:
        again = dcp.merge_partials(torch.stack(outs), torch.stack(lses))
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 3e38])
@pytest.mark.parametrize("lse_of_empty", [-INF, NAN, INF])
def test_empty_parts_are_selected_away(garbage: float, lse_of_empty: float) -> None:
    outs = torch.tensor([2.0, garbage]).view(2, 1, 1, 1)
    lses = torch.tensor([1.0, lse_of_empty]).view(2, 1, 1)
    out, lse = dcp.merge_partials(outs, lses)
    assert out.item() == 2.0 and lse.item() == 1.0


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_all_parts_empty_give_zero_and_no_weight(parts: int) -> None:
    outs, lses = torch.full((parts, 1, 2, 3), NAN), torch.full((parts, 1, 2), -INF)
    out, lse = dcp.merge_partials(outs, lses)
    assert torch.equal(out, torch.zeros(1, 2, 3))
    assert torch.equal(lse, torch.full((1, 2), -INF))


def test_no_part_at_all_and_no_row_at_all() -> None:
    out, lse = dcp.merge_partials(torch.zeros(3, 0, 2, 4), torch.zeros(3, 0, 2))
    assert out.shape == (0, 2, 4) and lse.shape == (0, 2)


def test_a_part_of_negligible_weight_may_hold_anything_finite() -> None:
    out, lse = dcp.merge_partials(torch.tensor([1.0, 1e30]).view(2, 1, 1, 1), torch.tensor([0.0, -1e4]).view(2, 1, 1))
    assert out.item() == 1.0 and lse.item() == 0.0


@pytest.mark.parametrize("shift", [1e4, -1e4, 88.0, -88.0])
def test_large_scores_neither_overflow_nor_vanish(shift: float) -> None:
    outs, lses = torch.tensor([1.0, 3.0]).view(2, 1, 1, 1), torch.tensor([0.0, 0.0]).view(2, 1, 1)
    out, lse = dcp.merge_partials(outs, lses + shift)
    assert out.item() == 2.0
    assert lse.item() == pytest.approx(shift + math.log(2))


def test_a_base_converted_twice_is_another_number() -> None:
    """Values 1 and 3, natural LSE 0 and 2. One conversion too many changes the weights without any error."""
    outs = torch.tensor([1.0, 3.0], dtype=torch.float64).view(2, 1, 1, 1)
    natural = torch.tensor([0.0, 2.0], dtype=torch.float64).view(2, 1, 1)
    right = merge_partials(outs, natural)[0].item()
    assert right == pytest.approx(2.761594, abs=1e-6)
    assert merge_partials(outs, natural / math.log(2), base=2.0)[0].item() == pytest.approx(right, abs=1e-12)
    assert merge_partials(outs, natural / math.log(2))[0].item() == pytest.approx(2.894239, abs=1e-6)


def test_keys_that_every_rank_has_in_hand_count_once() -> None:
    """Four ranks with two committed keys of value 1 each, and a window of two keys of value 5 that all of them see."""
    committed, window = torch.tensor([1.0]), torch.tensor([5.0])

    def over(ranks_with_window: int) -> float:
        outs = [committed] * 4 + [window] * ranks_with_window
        lses = [torch.tensor([math.log(2)])] * len(outs)
        return merge_partials(torch.stack(outs)[:, None, None], torch.stack(lses)[:, None])[0].item()

    assert over(1) == pytest.approx(1.8)
    assert over(4) == pytest.approx(3.0)  # what folding the window into every shard would give


def test_a_merge_of_merges_is_the_merge() -> None:
    generator = torch.Generator().manual_seed(0)
    outs, lses, wanted, wanted_lse = softmax_parts(generator, [3, 0, 2, 1, 4], 2, 3, 4)
    first = merge_partials(torch.stack(outs[:2]), torch.stack(lses[:2]))
    second = merge_partials(torch.stack(outs[2:]), torch.stack(lses[2:]))
    out, lse = merge_partials(torch.stack([first[0], second[0]]), torch.stack([first[1], second[1]]))
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_partials_of_two_bytes_merge_in_float32_and_round_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    outs, lses = normal(generator, 8, 5, 3, 6, dtype=dtype), normal(generator, 8, 5, 3, dtype=torch.float32)
    out, lse = dcp.merge_partials(outs, lses)
    assert out.dtype == dtype and lse.dtype == torch.float32
    exact, _ = merge_partials(outs.double(), lses.double())
    step = torch.finfo(dtype).eps * exact.abs()
    assert ((out.double() - exact).abs() <= step / 2 + 1e-6).all()


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_message_carries_the_lse_to_the_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    out = normal(generator, 4, 3, 5, dtype=dtype)
    lse = (1e3 * normal(generator, 4, 3)).to(lse_dtype)
    lse[0] = torch.tensor([-INF, -0.0, torch.finfo(lse_dtype).tiny], dtype=lse_dtype)
    packed = pack_partials(out, lse)
    assert packed.shape == (4, 3, 5 + lse_dtype.itemsize // dtype.itemsize) and packed.dtype == dtype and packed.is_contiguous()
    assert torch.equal(packed[..., :5], out)
    integer = torch.int64 if dtype == torch.float64 else torch.int32
    lanes = packed[..., 5:].clone(memory_format=torch.contiguous_format).view(lse_dtype).squeeze(-1)
    assert torch.equal(lanes.view(integer), lse.view(integer))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_merging_messages_is_merging_partials(dtype: torch.dtype, parts: int) -> None:
    generator = torch.Generator().manual_seed(3)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    outs = normal(generator, parts, 4, 3, 5, dtype=dtype)
    lses = normal(generator, parts, 4, 3, dtype=lse_dtype)
    lses[0, 0], outs[0, 0] = -INF, NAN
    lses[:, 1], outs[:, 1] = -INF, NAN
    packed = torch.stack([pack_partials(out, lse) for out, lse in zip(outs, lses)])
    wanted = dcp.merge_partials(outs, lses)[0]
    assert torch.equal(dcp.merge_packed(packed, 5), wanted)
    assert not wanted.isnan().any() and (wanted[1] == 0).all()
    # as they arrive: parts of another rank's heads, cut out of something larger
    wide = torch.cat([packed, packed], dim=2)[:, :, 3:]
    assert torch.equal(dcp.merge_packed(wide, 5), wanted)


def test_an_odd_latent_size_keeps_the_lanes_apart() -> None:
    """Two 2-byte lanes at an odd offset are not 4-byte aligned."""
    out, lse = torch.ones(1, 1, 7, dtype=torch.bfloat16), torch.tensor([[math.pi]])
    packed = pack_partials(out, lse)[None]
    assert dcp.merge_packed(packed, 7).tolist() == [[[1.0] * 7]]
    assert packed[0, 0, 0, 7:].clone().view(torch.float32).item() == lse.item()
