# SPDX-License-Identifier: Apache-2.0
"""Random requests over sharded, poisoned pages, and dense attention over them by plain loops."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.cases import Sharding, between, normal

dcp = torch.ops.dcp


@dataclass
class Sequences:
    """One step of several requests.

    Attributes:
        before: tokens of each request before this step. positions: ``[B, S]``, -1 = padded row.
        keys: per request ``[tokens, R + rope]``, this step's tokens included. query: ``[T, H, R + rope]``.
        caches: one poisoned pool per rank, the keys written into it.
    """

    sharding: Sharding
    latent: int
    scale: float
    before: list[int]
    positions: Tensor
    keys: list[Tensor]
    query: Tensor
    table: Tensor
    caches: list[Tensor]

    @property
    def queries(self) -> tuple[Tensor, Tensor]:
        return self.query[..., : self.latent], self.query[..., self.latent :]

    def place(self, rank: int) -> tuple[int, int, int]:
        return rank, *self.sharding.deal

    def rows(self, rank: int, backend: str = "torch") -> tuple[Tensor, Tensor]:
        """Every row over its own bound."""
        bounds = dcp.row_bounds(self.positions, *self.place(rank))
        requests = dcp.row_requests(self.positions)
        return dcp.mla_rows(*self.queries, self.caches[rank], self.table, requests, bounds, self.scale, backend)

    def prefix(self, rank: int, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Every row over the first ``lengths[b]`` tokens."""
        bounds = dcp.prefix_bounds(lengths, *self.place(rank))
        return dcp.mla_prefix(*self.queries, self.caches[rank], self.table, bounds, self.scale, "torch")

    def tail(self, rank: int, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Every row from ``lengths[b]`` tokens on up to its own bound."""
        starts = dcp.prefix_bounds(lengths, *self.place(rank))
        bounds = dcp.row_bounds(self.positions, *self.place(rank))
        requests = dcp.row_requests(self.positions)
        return dcp.mla_tail(*self.queries, self.caches[rank], self.table, requests, starts, bounds, self.scale, "torch")

    def dense(self, first: list[int] | None = None, last: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Attention of every row to tokens ``[first[b], min(last[b], its position + 1))``, key by key in float64."""
        outs, lses = [], []
        heads = self.query.shape[1]
        for row, position in enumerate(self.positions.flatten().tolist()):
            request = row // self.positions.shape[1]
            start = first[request] if first else 0
            stop = last[request] if last else position + 1
            keys = self.keys[request].double()[start : max(stop, start)]
            for head in range(heads):
                scores = [float(key @ self.query[row, head].double()) * self.scale for key in keys]
                top = max(scores, default=0.0)
                weights = [math.exp(score - top) for score in scores]
                out = torch.zeros(self.latent, dtype=torch.float64)
                for weight, key in zip(weights, keys):
                    out += weight / sum(weights) * key[: self.latent]
                outs.append(out)
                lses.append(top + math.log(sum(weights)) if scores else -math.inf)
        shape = (self.query.shape[0], heads)
        lse = torch.tensor(lses, dtype=torch.float64).view(shape)
        return (torch.stack(outs) if outs else torch.zeros(0)).reshape(*shape, self.latent), lse


def random_sequences(
    generator: torch.Generator, sharding: Sharding, batch: int, rows: int, dtype: torch.dtype = torch.float64
) -> Sequences:
    """Requests of 0..12 tokens with 0..rows new ones."""
    before = [between(generator, 0, 12) for _ in range(batch)]
    return sequences_of(generator, sharding, before, [between(generator, 0, rows) for _ in range(batch)], rows, dtype)


def sequences_of(
    generator: torch.Generator, sharding: Sharding, before: list[int], new: list[int], rows: int,
    dtype: torch.dtype = torch.float64,
) -> Sequences:  # fmt: skip
    """Requests of ``before`` tokens with ``new`` ones, padded on the right to ``rows``; pages in random order."""
    batch = len(before)
    latent, rope, heads = (between(generator, 1, 5) for _ in range(3))
    positions = torch.full((batch, rows), -1)
    for request, (start, count) in enumerate(zip(before, new)):
        positions[request, :count] = torch.arange(start, start + count)
    columns = [-(-(start + count) // sharding.column) for start, count in zip(before, new)]
    width = max(columns, default=0) + between(generator, 0, 1)
    order = (torch.randperm(sum(columns), generator=generator) + 1).tolist()
    table = torch.zeros(batch, width, dtype=torch.int32)
    for request, count in enumerate(columns):
        table[request, :count] = torch.tensor([order.pop() for _ in range(count)])
    keys = [normal(generator, start + count, latent + rope, dtype=dtype) for start, count in zip(before, new)]
    caches = []
    for rank in range(sharding.dcp_size):
        cache = torch.full((1 + sum(columns), sharding.block_size, latent + rope), torch.nan, dtype=dtype)
        for request, tokens in enumerate(keys):
            slots = dcp.cp_local_slot(
                torch.arange(len(tokens))[None], table[request : request + 1], sharding.block_size, rank, *sharding.deal
            )
            dcp.kv_write(tokens[:, :latent], tokens[:, latent:], cache, slots)
        caches.append(cache)
    query = normal(generator, batch * rows, heads, latent + rope, dtype=dtype)
    return Sequences(sharding, latent, (latent + rope) ** -0.5, before, positions, keys, query, table, caches)


def step_positions(generator: torch.Generator, batch: int, rows: int, fresh: list[bool]) -> Tensor:
    """Rows padded at the end, or before the first token of a request that is new."""
    positions = torch.full((batch, rows), -1)
    for request in range(batch):
        count = between(generator, 0, rows)
        first = 0 if fresh[request] else between(generator, 1, 50)
        start = rows - count if fresh[request] and between(generator, 0, 1) else 0
        positions[request, start : start + count] = torch.arange(first, first + count)
    return positions


def poisoned_rows(x: Tensor, positions: Tensor) -> Tensor:
    """``x [B, S, ...]`` as rows, NaN where padded."""
    return torch.where((positions >= 0).view(*positions.shape, *[1] * (x.dim() - 2)), x, torch.nan).flatten(0, 1)
