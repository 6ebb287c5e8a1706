# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels as CUDA implementations of the operators. Importing this module registers them."""

from __future__ import annotations

from torch import Tensor

from ..kernels import conv, kda, kda_verify, kda_verify_hopper, kv_write, merge, peer_gather, peer_merge, prologue
from . import exchange
from ._library import kernel


def _by_request(x: Tensor, positions: Tensor) -> Tensor:
    """Rows ``[T, 1, ...]`` as ``[B, S, ...]``."""
    return x[:, 0].unflatten(0, positions.shape)


def _kda(q, k, v, g, beta, state, state_slots, positions, scale, qk_l2norm):
    rows = (_by_request(x, positions) for x in (q, k, v, g, beta))
    return kda.kda(*rows, state, state_slots, positions, scale, qk_l2norm).view(v.shape)


def _kda_verify(
    q, k, v, g, beta, state, pending_k, pending_u, pending_g, accepted, state_slots, positions, scale, qk_l2norm
):
    rows = (_by_request(x, positions) for x in (q, k, v, g, beta))
    step = (*rows, state, pending_k, pending_u, pending_g)
    chosen = kda_verify_hopper if kda_verify_hopper.fits(*step) else kda_verify
    out = chosen.kda_verify(*step, accepted, state_slots, positions, scale, qk_l2norm)
    return out.view(v.shape)


def _gather_heads(query: Tensor, size: int, group: str) -> Tensor:
    rows, heads, width = query.shape
    boxes = exchange.MAILBOXES.get(group)
    if boxes is None or not boxes.gather.fits(rows * heads, width * query.element_size()):
        return exchange.gather_heads(query, size, group)
    return peer_gather.gather_heads(query, boxes.gather)


def _merge_ranks(out: Tensor, lse: Tensor, heads: int, size: int, group: str) -> Tensor:
    boxes = exchange.MAILBOXES.get(group)
    if boxes is None or not boxes.merge.fits(out.shape[0] * heads, out.shape[2] * out.element_size()):
        return exchange.merge_ranks(out, lse, heads, size, group)
    return peer_merge.merge_ranks(out, lse, heads, boxes.merge)


kernel("step_metadata", prologue.step_metadata)
kernel("block_metadata", prologue.block_metadata)
kernel("kv_write", kv_write.kv_write)
kernel("merge_partials", merge.merge_partials)
kernel("merge_packed", merge.merge_packed)
kernel("gather_heads", _gather_heads)
kernel("merge_ranks", _merge_ranks)
kernel("conv_window", conv.conv_window)
kernel("conv_window_verify", conv.conv_window_verify)
kernel("kda", _kda)
kernel("kda_verify", _kda_verify)
