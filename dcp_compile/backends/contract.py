# SPDX-License-Identifier: Apache-2.0
"""What an attention backend declares, what a model asks for, and the reasons why the two do not fit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class BackendCapabilities:
    """Everything a backend can do. There are no defaults: a backend that forgets to declare something cannot exist.

    ``None`` in a set-valued field means any value.

    Attributes:
        device_types: torch device types, such as {"cpu", "cuda"}.
        compute_capabilities: CUDA compute capabilities (major, minor), or None.
        query_dtypes, kv_dtypes: dtypes of queries and of the cache.
        latent_dims, rope_dims, head_counts, page_sizes: supported sizes, or None.
        layouts: decode layouts it can run ("split", "flattened"), the best one first.
        returns_lse: partial outputs come with their log-sum-exp.
        lse_base: base of the logarithm its kernel reports; the backend converts to natural logarithms itself.
        causal_multi_token_dcp: several causal query rows per request on a sharded cache.
        non_causal_multi_token_dcp: several rows that all see the whole context, on a sharded cache.
        varlen_dcp: different numbers of query rows per request on a sharded cache.
        interleave_above_one: runs of more than one consecutive token per rank.
        graph_safe_without_planning: can be captured in a CUDA graph with lengths only the device knows. A backend that
            cannot may have a ``plan`` call instead, see :class:`PlanningBackend`.
        max_query_rows: most query rows per request, or None.
    """

    device_types: frozenset[str]
    compute_capabilities: frozenset[tuple[int, int]] | None
    query_dtypes: frozenset[torch.dtype] | None
    kv_dtypes: frozenset[torch.dtype] | None
    latent_dims: frozenset[int] | None
    rope_dims: frozenset[int] | None
    head_counts: frozenset[int] | None
    page_sizes: frozenset[int] | None
    layouts: tuple[str, ...]
    returns_lse: bool
    lse_base: float
    causal_multi_token_dcp: bool
    non_causal_multi_token_dcp: bool
    varlen_dcp: bool
    interleave_above_one: bool
    graph_safe_without_planning: bool
    max_query_rows: int | None

    def __post_init__(self) -> None:
        if self.lse_base not in (2.0, math.e):
            raise ValueError(f"lse_base={self.lse_base} must be 2.0 or math.e")
        if not self.layouts or not set(self.layouts) <= {"split", "flattened"}:
            raise ValueError(f'layouts={self.layouts} must name "split", "flattened" or both, the best one first')


@dataclass(frozen=True)
class AttentionRequirements:
    """What one model's attention needs from its backend, derived from the captured graph and the configuration.

    Attributes:
        compute_capability: of the device, None without CUDA.
        heads: query heads one call sees (all of the DCP group when heads are sharded).
        layout: "auto" when any will do.
        query_rows: most rows per request; causal: whether they mask one another.
        ragged: requests of one step may have different numbers of rows.
        cuda_graphs: the call will be captured.
    """

    device_type: str
    compute_capability: tuple[int, int] | None
    query_dtype: torch.dtype
    kv_dtype: torch.dtype
    latent: int
    rope: int
    heads: int
    page_size: int
    layout: str
    dcp_size: int
    interleave: int
    causal: bool
    query_rows: int
    ragged: bool
    cuda_graphs: bool


class AttentionBackend(Protocol):
    """The three calls of :mod:`dcp_compile.ops.mla`, for one device and library.

    A backend that declares float8 caches takes one more number behind ``scale``: ``kv_scale: float = 1.0``, what the
    values of the cache are multiplied by. It is given if it is not 1.

    The tail call of a block with a window is also given ``keys: int``, about the most keys a row sees; other tails have few.
    """

    name: str
    capabilities: BackendCapabilities

    def unavailable(self) -> str | None:
        """Why this machine cannot run it (library missing, no GPU), or None."""

    def attend_rows(
        self, q_latent: Tensor, q_rope: Tensor, kv_cache: Tensor, block_table: Tensor, requests: Tensor,
        bounds: Tensor, scale: float,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def attend_prefix(
        self, q_latent: Tensor, q_rope: Tensor, kv_cache: Tensor, block_table: Tensor, prefix_bounds: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def attend_tail(
        self, q_latent: Tensor, q_rope: Tensor, kv_cache: Tensor, block_table: Tensor, requests: Tensor,
        prefix_bounds: Tensor, bounds: Tensor, scale: float,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip


class PrefixPlan(Protocol):
    """What a planning backend knows of a step's prefixes, for all layers. As a context: prefix calls use this plan."""

    def update(self, block_table: Tensor, prefix_bounds: Tensor, rows: int) -> None:
        """Plan anew, also between replays of a graph captured under this plan. Nothing waits for a step to end.

        Args:
            block_table: ``[B, columns]`` int32. prefix_bounds: ``[B]``, keys of each prefix on this rank; both on the
                host.
            rows: query rows per request; the same in every plan of a captured call.

        Raises:
            BackendError: a step of this size cannot be planned.
        """

    def __enter__(self) -> PrefixPlan: ...

    def __exit__(self, *exception: object) -> None: ...


class PlanningBackend(AttentionBackend, Protocol):
    """A backend whose prefix call needs a plan, made on the host (see :mod:`dcp_compile.runtime.planning`).

    Its ``attend_prefix`` reads block table and bounds from the plan in force, and its other calls need none.
    """

    def plan(
        self, need: AttentionRequirements, scale: float, device: torch.device, size: tuple[int, int] | None
    ) -> PrefixPlan:
        """An empty plan.

        Args:
            need: what the calls have in common, with their softmax ``scale``.
            size: requests and block-table columns of calls that will be captured; None: any, and none is captured.
        """


def plans_prefixes(backend: AttentionBackend) -> bool:
    """Whether it is a :class:`PlanningBackend`."""
    return callable(getattr(backend, "plan", None))


def _listed(values: frozenset) -> str:
    if len(values) > 2 and all(type(value) is int for value in values):
        low, high = min(values), max(values)
        if high - low + 1 == len(values):
            return f"{low} to {high}"
    return ", ".join(sorted(str(value) for value in values))


def rejections(have: BackendCapabilities, need: AttentionRequirements, plans: bool = False) -> list[str]:
    """Every reason why a backend with ``have`` cannot serve ``need``; empty when it can.

    Args:
        plans: it is a :class:`PlanningBackend`, so what it cannot read on the device is planned between replays.
    """
    reasons = []

    def within(label: str, value: object, supported: frozenset | None) -> None:
        if supported is not None and value not in supported:
            reasons.append(f"{label} {value} not supported (supported: {_listed(supported)})")

    within("device type", need.device_type, have.device_types)
    within("compute capability", need.compute_capability, have.compute_capabilities)
    within("query dtype", need.query_dtype, have.query_dtypes)
    within("kv cache dtype", need.kv_dtype, have.kv_dtypes)
    within("latent dim", need.latent, have.latent_dims)
    within("rope dim", need.rope, have.rope_dims)
    within("head count", need.heads, have.head_counts)
    within("page size", need.page_size, have.page_sizes)
    if need.layout != "auto":
        within("decode layout", need.layout, frozenset(have.layouts))
    if not have.returns_lse:
        reasons.append("does not return the log-sum-exp that merging partial attention needs")
    if need.dcp_size > 1:
        if need.interleave > 1 and not have.interleave_above_one:
            reasons.append(f"kv_interleave {need.interleave} not supported (only 1)")
        if need.query_rows > 1 and need.causal and not have.causal_multi_token_dcp:
            reasons.append("causal multi-token queries on a sharded cache not supported")
        if need.query_rows > 1 and not need.causal and not have.non_causal_multi_token_dcp:
            reasons.append("non-causal multi-token queries on a sharded cache not supported")
        if need.ragged and not have.varlen_dcp:
            reasons.append("different query lengths per request on a sharded cache not supported")
    if have.max_query_rows is not None and need.query_rows > have.max_query_rows:
        reasons.append(f"{need.query_rows} query rows per request not supported (at most {have.max_query_rows})")
    if need.cuda_graphs and not have.graph_safe_without_planning and not plans:
        reasons.append("reads lengths on the host and has no plan call: a CUDA graph would replay those of its capture")
    return reasons
