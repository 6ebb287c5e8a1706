# SPDX-License-Identifier: Apache-2.0
"""merge_partials: weights by LSE, empty parts selected away."""

from __future__ import annotations

import math
import random

import pytest
import torch
from kernel_inputs import strided

from dcp_compile.kernels.merge import merge_into, merge_packed, merge_partials
from dcp_compile.ops import merge as reference

INF, NAN = math.inf, math.nan


@pytest.mark.seeds(25)
def test_equals_reference(draw: random.Random, device: str) -> None:
    parts, rows, heads = draw.choice([1, 2, 3, 8, 17]), draw.choice([0, 1, 3]), draw.choice([1, 3, 5])
    latent = draw.choice([1, 8, 24, 64, 130])
    dtype = draw.choice([torch.float32, torch.float16])
    outs = torch.randn(parts, rows, heads, latent).to(dtype)
    lses = torch.randn(parts, rows, heads) * draw.choice([1, 30])
    empty = torch.rand(parts, rows, heads) < draw.choice([0, 0.4, 1])
    lses[empty] = draw.choice([-INF, INF, NAN])
    outs[empty] = draw.choice([NAN, INF, 1e4])
    want, want_lse = reference.merge_partials(outs.double(), lses.double())
    out, lse = merge_partials(strided(outs.to(device), draw), strided(lses.to(device), draw))
    assert out.dtype == dtype and lse.dtype == torch.float32 and out.is_contiguous()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(out.cpu().double(), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.seeds(3)
def test_partials_in_float32_merge_into_another_type(draw: random.Random, device: str) -> None:
    outs, lses = torch.randn(4, 2, 3, 16, device=device), torch.randn(4, 2, 3, device=device)
    out, lse = torch.full((2, 3, 16), NAN, dtype=torch.float16, device=device), torch.full((2, 3), NAN, device=device)
    merge_into(outs, lses, out, lse)
    want, want_lse = reference.merge_partials(outs.cpu(), lses.cpu())
    assert torch.equal(out.cpu(), want.half()) or (out.cpu() - want).abs().max() < 2e-3
    torch.testing.assert_close(lse.cpu(), want_lse)


@pytest.mark.seeds(12)
def test_packed_messages(draw: random.Random, device: str) -> None:
    """The LSE travels in the lanes behind the latent; odd latent sizes and some strides forbid reading it in place."""
    parts, rows, heads = draw.choice([1, 2, 4]), draw.choice([0, 1, 3]), draw.choice([1, 3])
    latent = draw.choice([7, 8, 24])
    dtype = draw.choice([torch.float32, torch.float16])
    outs, lses = torch.randn(parts, rows, heads, latent).to(dtype), torch.randn(parts, rows, heads)
    lses[torch.rand(lses.shape) < 0.3] = -INF
    outs[lses == -INF] = NAN
    packed = torch.stack([reference.pack_partials(out, lse) for out, lse in zip(outs, lses)]).to(device)
    if draw.random() < 0.3:
        packed = packed.transpose(0, 1).contiguous().transpose(0, 1)
    got = merge_packed(packed, latent)
    want, _ = reference.merge_partials(outs.double(), lses.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    assert got.dtype == dtype
    torch.testing.assert_close(got.cpu().double(), want, rtol=tolerance, atol=tolerance)


def test_empty_shards(device: str) -> None:
    """The garbage of a rank without keys neither wins nor spreads; all ranks empty give 0 and -inf."""

    def merged(outs, lses):
        out, lse = merge_partials(
            torch.tensor(outs, device=device).reshape(-1, 1, 1, 1), torch.tensor(lses, device=device).reshape(-1, 1, 1)
        )
        return out.item(), lse.item()

    assert merged([2.0, NAN], [1.0, -INF]) == (2.0, 1.0)
    assert merged([NAN, 3.5], [-INF, 0.0]) == (3.5, 0.0)
    assert merged([NAN, NAN], [-INF, -INF]) == (0.0, -INF)
    assert merged([NAN, 3.5], [NAN, 0.0]) == (3.5, 0.0)
    assert merged([INF, 3.5], [INF, 0.0]) == (3.5, 0.0)


def test_logarithms_are_natural(device: str) -> None:
    """LSEs 0 and 2 weigh as 1 : e^2; a second change of base would give 2.894."""
    outs, lses = torch.tensor([1.0, 3.0], device=device), torch.tensor([0.0, 2.0], device=device)
    out, lse = merge_partials(outs.reshape(2, 1, 1, 1), lses.reshape(2, 1, 1))
    assert out.item() == pytest.approx(2.761594, abs=1e-5)
    assert lse.item() == pytest.approx(math.log(1 + math.exp(2)), abs=1e-5)


def test_window_counts_once(device: str) -> None:
    """Two extra keys held by one rank only: (8 * 1 + 2 * 5) / 10."""
    outs = torch.tensor([1.0, 1.0, 1.0, 1.0, 5.0], device=device).reshape(5, 1, 1, 1)
    lses = torch.tensor([2.0, 2, 2, 2, 2], device=device).log().reshape(5, 1, 1)
    assert merge_partials(outs, lses)[0].item() == pytest.approx(1.8, abs=1e-6)
