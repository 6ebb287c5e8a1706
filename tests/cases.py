# SPDX-License-Identifier: Apache-2.0
"""Random cases that several test folders draw from (hypothesis prints the failing one and how to replay it)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor


def examples(count: int) -> Callable:
    """Run a hypothesis test ``count`` times, however long one run takes."""
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True)
class Sharding:
    """How tokens are dealt to ranks: D ranks, runs of I tokens, pages of b tokens per rank."""

    dcp_size: int
    interleave: int
    block_size: int

    @property
    def deal(self) -> tuple[int, int]:
        return self.dcp_size, self.interleave

    @property
    def column(self) -> int:
        """Positions that one block-table column covers."""
        return self.dcp_size * self.block_size


@st.composite
def shardings(draw: Callable, most_ranks: int = 8) -> Sharding:
    interleave = draw(st.integers(1, 6))
    return Sharding(draw(st.integers(1, most_ranks)), interleave, interleave * draw(st.integers(1, 4)))


seeds = st.integers(0, 2**31 - 1)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def generators() -> st.SearchStrategy[torch.Generator]:
    return st.builds(seeded, seeds)


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def between(generator: torch.Generator, low: int, high: int) -> int:
    """A random integer, both ends included."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def strided(tensor: Tensor) -> Tensor:
    """The same values behind strides that are not those of a contiguous tensor; whatever lies between is NaN or -77."""
    around = float("nan") if tensor.is_floating_point() else -77
    wide = torch.full([2 * size + 1 for size in tensor.shape], around, dtype=tensor.dtype)
    window = wide[tuple(slice(1, None, 2) for _ in tensor.shape)]
    window.copy_(tensor)
    return window
