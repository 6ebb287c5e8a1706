# SPDX-License-Identifier: Apache-2.0
"""Every query row as a request of its own: for kernels whose mask between rows knows nothing of a sharded cache.

The bound of a row is then its length, causal or not, for any number of ranks and any interleave. The price is that
every row reads the keys of its request.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .portable_tail import PortableTail

KEYS_PER_TILE = 128
"""Keys the CuTe-DSL kernels take at once; the page list of a row must fill whole tiles."""


class SingleRows(PortableTail):
    """The calls of a backend that follow from its ``attend_rows``: a prefix is the same bound for all rows of a request,
    and the tail runs on the portable kernel."""

    def attend_prefix(
        self, q_latent: Tensor, q_rope: Tensor, kv_cache: Tensor, block_table: Tensor, prefix_bounds: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        requests = requests_of(len(q_latent), prefix_bounds)
        bounds = prefix_bounds[requests]
        return self.attend_rows(q_latent, q_rope, kv_cache, block_table, requests, bounds, scale)


@functools.cache
def workspace(size: int, device: torch.device) -> Tensor:
    """Scratch memory of ``size`` bytes, zeroed once."""
    return torch.zeros(size, dtype=torch.int8, device=device)


def queries(q_latent: Tensor, q_rope: Tensor) -> Tensor:
    """Rows as requests with one query each, ``[T, 1, H, R + Dr]``."""
    return torch.cat([q_latent, q_rope], dim=-1)[:, None]


def page_lists(block_table: Tensor, requests: Tensor, page_size: int) -> Tensor:
    """Pages of every row's request, ``[T, columns]``, filled up with null pages."""
    lists = block_table[requests.long()]
    return torch.nn.functional.pad(lists, (0, -lists.shape[1] % (KEYS_PER_TILE // page_size)))


def requests_of(rows: int, prefix_bounds: Tensor) -> Tensor:
    """Request of each of ``rows`` rows, request-major, ``[rows]`` int64."""
    requests = len(prefix_bounds)
    index = torch.arange(requests, device=prefix_bounds.device)
    return index.repeat_interleave(rows // max(requests, 1), output_size=rows)


def without_empty_rows(out: Tensor, lse: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """0 and -inf for rows without keys, of which the kernels write nothing or an infinite log-sum-exp.

    Args:
        out: ``[T, 1, H, R]``. lse: ``[T, H]`` or ``[T, 1, H]``.
    """
    empty = bounds == 0
    lse = lse.reshape(len(bounds), -1)
    return out[:, 0].masked_fill(empty[:, None, None], 0.0), lse.masked_fill(empty[:, None], -math.inf)
