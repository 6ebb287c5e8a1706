# SPDX-License-Identifier: Apache-2.0
"""Writing new latents into the paged cache of one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import define, fake, reference

define("kv_write(Tensor latent, Tensor rope, Tensor(a!) kv_cache, Tensor slots) -> ()")


@reference("kv_write")
def kv_write(latent: Tensor, rope: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    """Store row t as ``[latent | rope]`` at ``slots[t]``; rows with PAD_SLOT are not stored.

    Args:
        latent: ``[T, latent]``. rope: ``[T, rope]``.
        kv_cache: ``[pages, block_size, latent + rope]``, written in place.
        slots: ``[T]`` int64 into the flattened pool. The sign is tested before indexing: -1 would be a valid index.
    """
    keep = slots >= 0
    rows = torch.cat([latent, rope], dim=-1)[keep].to(kv_cache.dtype)
    kv_cache.view(-1, kv_cache.shape[-1])[slots[keep]] = rows


@fake("kv_write")
def _(latent, rope, kv_cache, slots) -> None:
    return None
