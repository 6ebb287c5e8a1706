# SPDX-License-Identifier: Apache-2.0
"""Block attention residuals (AttnRes): each sublayer reads a learned mixture of earlier block states.

Nothing is kept between steps: the state lives for one forward pass, one entry per token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .layers import compute_dtype

EPS = 1e-5


class Residual(NamedTuple):
    """The residual stream between two layers.

    prefix: running sum of sublayer outputs since the last snapshot, ``[batch, seq, hidden]``.
    snapshots: the prefixes banked so far, ``[blocks, batch, seq, hidden]``, or None before the first one.
    scales: ``1 / rms`` of each snapshot, ``[blocks, batch, seq, 1]`` in float32. Computed once, when it is banked.
    """

    prefix: Tensor
    snapshots: Tensor | None = None
    scales: Tensor | None = None


class MixQuery(nn.Linear):
    """The learned query of one mixture, weight ``[1, hidden]``; a class of its own because it starts at zero."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, bias=False)


def inverse_rms(x: Tensor) -> Tensor:
    """``1 / sqrt(mean(x^2) + eps)`` over the last dim, kept, in float32."""
    wide = x.to(compute_dtype(x))
    return torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)


def restart(residual: Residual, prefix: Tensor) -> Residual:
    """Bank the running prefix as a snapshot and start over from ``prefix``."""
    snapshots, scales = residual.prefix[None], inverse_rms(residual.prefix)[None]
    if residual.snapshots is not None:
        snapshots, scales = torch.cat([residual.snapshots, snapshots]), torch.cat([residual.scales, scales])
    return Residual(prefix, snapshots, scales)


def mix(residual: Residual, norm: nn.Module, query: MixQuery) -> Tensor:
    """Softmax mixture of the snapshots and the prefix, ``[batch, seq, hidden]``.

    The score of source v is ``sum_c (v / rms(v))[c] * norm[c] * query[c]``, with no further scale; the mixture is taken
    over the raw sources. Scores, softmax and sum are float32. Without a snapshot the mixture is the prefix itself.
    """
    prefix, snapshots, scales = residual
    if snapshots is None:
        return prefix
    dtype = compute_dtype(prefix)
    direction = norm.weight.to(dtype) * query.weight[0].to(dtype)
    wide_prefix, wide_snapshots = prefix.to(dtype), snapshots.to(dtype)
    snapshot_scores = (wide_snapshots * direction).sum(-1, keepdim=True) * scales
    prefix_score = (wide_prefix * direction).sum(-1, keepdim=True) * inverse_rms(prefix)
    shares = torch.cat([snapshot_scores, prefix_score[None]]).softmax(0)
    return ((shares[:-1] * wide_snapshots).sum(0) + shares[-1] * wide_prefix).to(prefix.dtype)
