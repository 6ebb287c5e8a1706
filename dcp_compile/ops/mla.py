# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA attention over one rank's pages: partial outputs with their log-sum-exp.

Shapes: q_latent ``[T, H, R]``, q_rope ``[T, H, Dr]``, kv_cache ``[pages, block_size, R + Dr]``, block_table
``[B, columns]`` int32, T = B * S rows, request-major. Keys are the whole cache row, values its first R columns. Results:
out ``[T, H, R]`` in the dtype of q_latent, lse ``[T, H]`` float32, natural logarithm. A row that sees no key gives 0
and -inf.

``backend`` names the registered attention backend that runs the call (see :mod:`dcp_compile.backends`); the functions
``attend_*`` here are the torch backend and the specification of all others.

``kv_scale`` is what the values of the cache are multiplied by when they are read; 1 unless the cache is float8.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._library import compute_dtype, define, fake, reference

_QUERY_AND_CACHE = "Tensor q_latent, Tensor q_rope, Tensor kv_cache, Tensor block_table"
_HOW = "float scale, str backend, float kv_scale=1.0"
define(f"mla_rows({_QUERY_AND_CACHE}, Tensor requests, Tensor bounds, {_HOW}) -> (Tensor, Tensor)")
define(f"mla_prefix({_QUERY_AND_CACHE}, Tensor prefix_bounds, {_HOW}) -> (Tensor, Tensor)")
define(
    f"mla_tail({_QUERY_AND_CACHE}, Tensor requests, Tensor prefix_bounds, Tensor bounds, {_HOW}, int keys=0) -> "
    "(Tensor, Tensor)"
)


def _attend(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    requests: Tensor,
    starts: Tensor,
    bounds: Tensor,
    scale: float,
    kv_scale: float,
) -> tuple[Tensor, Tensor]:
    """Row t attends the local keys ``[starts[t], bounds[t])`` of request ``requests[t]``."""
    latent = q_latent.shape[-1]
    dtype = compute_dtype(q_latent.dtype)
    query = torch.cat([q_latent, q_rope], dim=-1).to(dtype)
    out = torch.zeros(q_latent.shape, dtype=dtype, device=q_latent.device)
    lse = torch.full(q_latent.shape[:2], -math.inf, dtype=dtype, device=q_latent.device)
    block_size = kv_cache.shape[1]
    for request in range(block_table.shape[0]):
        rows = (requests == request).nonzero().squeeze(-1)
        first, longest = (int(starts[rows].min()), int(bounds[rows].max())) if rows.numel() else (0, 0)
        if longest <= first:
            continue
        first -= first % block_size  # read whole pages, and none before the first key that is seen
        pages = block_table[request, first // block_size : -(-longest // block_size)].long()
        keys = kv_cache[pages].reshape(-1, kv_cache.shape[-1])[: longest - first].to(dtype) * kv_scale
        index = torch.arange(first, longest, device=keys.device)
        seen = (index >= starts[rows, None]) & (index < bounds[rows, None])
        keys = torch.where(seen.any(dim=0)[:, None], keys, 0.0)  # unwritten cache rows may hold NaN
        scores = torch.einsum("the,le->thl", query[rows], keys) * scale
        scores = scores.masked_fill(~seen[:, None, :], -math.inf)
        row_lse = torch.logsumexp(scores, dim=-1)
        probabilities = torch.exp(scores - torch.where(row_lse == -math.inf, 0.0, row_lse)[..., None])
        out[rows] = torch.einsum("thl,lr->thr", probabilities, keys[:, :latent])
        lse[rows] = row_lse
    return out.to(q_latent.dtype), lse


def attend_rows(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    requests: Tensor,
    bounds: Tensor,
    scale: float,
    kv_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Row t attends the local keys ``[0, bounds[t])`` of request ``requests[t]``."""
    starts = torch.zeros_like(bounds)
    return _attend(q_latent, q_rope, kv_cache, block_table, requests, starts, bounds, scale, kv_scale)


def attend_prefix(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    prefix_bounds: Tensor,
    scale: float,
    kv_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Every row of request b attends the local keys ``[0, prefix_bounds[b])``."""
    batch = prefix_bounds.shape[0]
    rows = q_latent.shape[0] // max(batch, 1)
    requests = torch.arange(batch, device=q_latent.device).repeat_interleave(rows)
    bounds = prefix_bounds.repeat_interleave(rows)
    return attend_rows(q_latent, q_rope, kv_cache, block_table, requests, bounds, scale, kv_scale)


def attend_tail(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    requests: Tensor,
    prefix_bounds: Tensor,
    bounds: Tensor,
    scale: float,
    kv_scale: float = 1.0,
    keys: int = 0,
) -> tuple[Tensor, Tensor]:
    """Row t attends the local keys ``[prefix_bounds[requests[t]], bounds[t])``.

    keys: about how many that are at most, for kernels to arrange their work by; 0 means few. Results do not depend on it.
    """
    starts = prefix_bounds[requests.long()]
    return _attend(q_latent, q_rope, kv_cache, block_table, requests, starts, bounds, scale, kv_scale)


def _call(
    name: str, operands: tuple[Tensor, ...], scale: float, backend: str, kv_scale: float, **hints: int
) -> tuple[Tensor, Tensor]:
    from ..backends import get_backend  # the registry imports the functions above

    scales = (scale,) if kv_scale == 1 else (scale, kv_scale)  # backends without float8 caches take no other
    return getattr(get_backend(backend), name)(*operands, *scales, **hints)


@reference("mla_rows")
def _mla_rows(q_latent, q_rope, kv_cache, block_table, requests, bounds, scale, backend, kv_scale=1.0):
    operands = q_latent, q_rope, kv_cache, block_table, requests, bounds
    return _call("attend_rows", operands, scale, backend, kv_scale)


@reference("mla_prefix")
def _mla_prefix(q_latent, q_rope, kv_cache, block_table, prefix_bounds, scale, backend, kv_scale=1.0):
    operands = q_latent, q_rope, kv_cache, block_table, prefix_bounds
    return _call("attend_prefix", operands, scale, backend, kv_scale)


@reference("mla_tail")
def _mla_tail(
    q_latent, q_rope, kv_cache, block_table, requests, prefix_bounds, bounds, scale, backend, kv_scale=1.0, keys=0
):
    operands = q_latent, q_rope, kv_cache, block_table, requests, prefix_bounds, bounds
    return _call("attend_tail", operands, scale, backend, kv_scale, **({"keys": keys} if keys else {}))


def _shapes(q_latent: Tensor) -> tuple[Tensor, Tensor]:
    lse_dtype = compute_dtype(q_latent.dtype)
    return q_latent.new_empty(q_latent.shape), q_latent.new_empty(q_latent.shape[:2], dtype=lse_dtype)


@fake("mla_rows")
def _(q_latent, q_rope, kv_cache, block_table, requests, bounds, scale, backend, kv_scale=1.0):
    return _shapes(q_latent)


@fake("mla_prefix")
def _(q_latent, q_rope, kv_cache, block_table, prefix_bounds, scale, backend, kv_scale=1.0):
    return _shapes(q_latent)


@fake("mla_tail")
def _(q_latent, q_rope, kv_cache, block_table, requests, prefix_bounds, bounds, scale, backend, kv_scale=1.0, keys=0):
    return _shapes(q_latent)
