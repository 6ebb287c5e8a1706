# SPDX-License-Identifier: Apache-2.0
"""Writing new latents into the paged cache of one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import compute_dtype, define, fake, reference

define("kv_write(Tensor latent, Tensor rope, Tensor(a!) kv_cache, Tensor slots, float kv_scale=1.0) -> ()")

FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max


@reference("kv_write")
def kv_write(latent: Tensor, rope: Tensor, kv_cache: Tensor, slots: Tensor, kv_scale: float = 1.0) -> None:
    """Store row t as ``[latent | rope]`` at ``slots[t]``; rows with PAD_SLOT are not stored.

    Args:
        latent: ``[T, latent]``. rope: ``[T, rope]``.
        kv_cache: ``[pages, block_size, latent + rope]``, written in place.
        slots: ``[T]`` int64 into the flattened pool. The sign is tested before indexing: -1 would be a valid index.
        kv_scale: a float8 cache stores ``value / kv_scale``, rounded to nearest, and what is out of its range as
            +-448; NaN stays NaN. A cache of another type stores the values themselves.
    """
    keep = slots >= 0
    rows = torch.cat([latent, rope], dim=-1)[keep]
    if kv_cache.dtype == torch.float8_e4m3fn:
        rows = (rows.to(compute_dtype(rows.dtype)) * (1 / kv_scale)).clamp(-FLOAT8_MAX, FLOAT8_MAX)
    kv_cache.view(-1, kv_cache.shape[-1])[slots[keep]] = rows.to(kv_cache.dtype)


@fake("kv_write")
def _(latent, rope, kv_cache, slots, kv_scale=1.0) -> None:
    return None
