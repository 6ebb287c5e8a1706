# SPDX-License-Identifier: Apache-2.0
"""Merging attention partials over disjoint sets of keys by their log-sum-exp (LSE).

With ``o_i`` the normalised output and ``l_i`` the LSE of part i: ``l = logsumexp_i l_i`` and
``o = sum_i exp(l_i - l) o_i``. An empty part has ``l_i = -inf`` and an undefined ``o_i``: it is selected away, never
multiplied, so that NaN or garbage in it cannot reach the result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._library import compute_dtype, define, fake, reference

define("merge_partials(Tensor outs, Tensor lses) -> (Tensor, Tensor)")
define("merge_packed(Tensor packed, int latent) -> Tensor")


def merge_partials(outs: Tensor, lses: Tensor, base: float = math.e) -> tuple[Tensor, Tensor]:
    """Merge N partials.

    Args:
        outs: ``[N, T, H, R]``. lses: ``[N, T, H]`` float32, logarithms to ``base`` (e or 2).

    Returns:
        ``(out [T, H, R] in the dtype of outs, lse [T, H] to the same base)``. Where every part is empty: 0 and -inf.
    """
    natural = (lses * math.log(base) if base != math.e else lses).to(compute_dtype(outs.dtype))
    natural = torch.where(torch.isnan(natural) | (natural == math.inf), -math.inf, natural)
    top = natural.amax(dim=0)
    shift = torch.where(top == -math.inf, 0.0, top)
    weights = torch.exp(natural - shift)
    total = weights.sum(dim=0)
    part = torch.where((weights > 0)[..., None], outs.to(weights.dtype), 0.0)
    out = (part * weights[..., None]).sum(dim=0) / torch.where(total > 0, total, 1.0)[..., None]
    lse = shift + torch.log(total)
    return out.to(outs.dtype), (lse / math.log(base) if base != math.e else lse).to(lses.dtype)


@reference("merge_partials")
def _merge_partials(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return merge_partials(outs, lses)


def pack_partials(out: Tensor, lse: Tensor) -> Tensor:
    """One message per row and head: ``[T, H, R + lanes]`` in the dtype of ``out``.

    The LSE travels bit-exactly: as one lane of a 4- or 8-byte type, split over two lanes of a 2-byte type.
    """
    carrier = lse.to(compute_dtype(out.dtype)).contiguous()
    lanes = carrier.unsqueeze(-1).view(out.dtype)
    return torch.cat([out, lanes], dim=-1)


@reference("merge_packed")
def merge_packed(packed: Tensor, latent: int) -> Tensor:
    """Merge packed messages ``[N, T, H, R + lanes]`` of N ranks into ``[T, H, R]``; R = ``latent``."""
    lanes = packed[..., latent:].clone(memory_format=torch.contiguous_format)  # an odd latent size misaligns them
    lses = lanes.view(compute_dtype(packed.dtype)).squeeze(-1)
    return merge_partials(packed[..., :latent], lses)[0]


@fake("merge_partials")
def _(outs, lses):
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


@fake("merge_packed")
def _(packed, latent):
    return packed.new_empty(packed.shape[1], packed.shape[2], latent)
