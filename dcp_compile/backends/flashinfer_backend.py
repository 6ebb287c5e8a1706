# SPDX-License-Identifier: Apache-2.0
"""The flashinfer backend: FlashInfer's fa3 kernel for the prefix, on compute capability 9.0.

The kernel takes lengths and page lists from a plan that is made on the host. All rows of a request see the same
prefix, so one call without a mask serves them, causal or not; the tail runs on the portable kernel.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math

import torch
from torch import Tensor

from ..errors import BackendError, InvariantError
from .contract import AttentionRequirements, BackendCapabilities
from .portable_tail import PortableTail

LEAST_VERSION = (0, 6, 13)  # the first checked; earlier ones report base-2 logarithms only
WORKSPACE_BYTES = 32 << 20  # partial results of two query tiles per multiprocessor take 18 MB
# A plan lists pieces of work, in room for 16384 that the library does not check: one per tile of 64 query rows x heads
# (128 where there are more than 64), and at most one per multiprocessor more.
MOST_TILES = 16384 - 256


def installed_version_problem() -> str | None:
    """Why the installed FlashInfer will not do, or None."""
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return "flashinfer-python is not installed"
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if numbers < LEAST_VERSION:
        return f"flashinfer-python {version} is installed; {'.'.join(map(str, LEAST_VERSION))} or later is needed"
    return None


class FlashInferBackend(PortableTail):
    """Planned on the host, between steps. Per-row bounds would mean a plan per step, so there is no flattened layout."""

    name = "flashinfer"
    capabilities = BackendCapabilities(
        device_types=frozenset({"cuda"}),
        compute_capabilities=frozenset({(9, 0)}),
        query_dtypes=frozenset({torch.bfloat16, torch.float16}),
        kv_dtypes=frozenset({torch.bfloat16, torch.float16}),
        latent_dims=frozenset({512}),
        rope_dims=frozenset({64}),
        head_counts=None,
        page_sizes=None,
        layouts=("split",),
        returns_lse=True,
        lse_base=math.e,  # asked for in the call; the kernel's own is 2
        causal_multi_token_dcp=True,
        non_causal_multi_token_dcp=True,
        varlen_dcp=True,
        interleave_above_one=True,
        graph_safe_without_planning=False,
        max_query_rows=None,
    )

    def __init__(self) -> None:
        self.plan_in_force: FlashInferPlan | None = None

    def unavailable(self) -> str | None:
        return installed_version_problem() or (None if torch.cuda.is_available() else "no CUDA device")

    def plan(
        self, need: AttentionRequirements, scale: float, device: torch.device, size: tuple[int, int] | None
    ) -> FlashInferPlan:
        return FlashInferPlan(self, need, scale, device, size)

    def attend_rows(self, *operands: Tensor | float) -> tuple[Tensor, Tensor]:
        raise BackendError('the flashinfer backend plans prefixes only; use decode_layout="split" or another backend')

    def attend_prefix(
        self, q_latent: Tensor, q_rope: Tensor, kv_cache: Tensor, block_table: Tensor, prefix_bounds: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if self.plan_in_force is None:
            raise InvariantError("flashinfer: a prefix call outside of a plan")
        return self.plan_in_force.attend(q_latent, q_rope, kv_cache, scale)


class FlashInferPlan:
    """A wrapper of the library and the plan it holds.

    With a ``size``, everything a call reads lies in buffers that stay where they are: a captured call follows the plan.
    Its grid depends on rows and heads alone, which do not change.
    """

    def __init__(
        self,
        backend: FlashInferBackend,
        need: AttentionRequirements,
        scale: float,
        device: torch.device,
        size: tuple[int, int] | None,
    ):
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        self._backend, self._need, self._scale = backend, need, scale
        buffers: dict[str, Tensor | bool] = {}
        if size is not None:
            requests, columns = size
            lengths = {
                "qo_indptr": requests + 1, "kv_indptr": requests + 1, "kv_indices": requests * columns + 1,
                "kv_len_arr": requests,
            }  # fmt: skip
            buffers = {name: torch.zeros(count, dtype=torch.int32, device=device) for name, count in lengths.items()}
            buffers["use_cuda_graph"] = True
        self._wrapper = BatchMLAPagedAttentionWrapper(_workspace(device), backend="fa3", **buffers)
        self._rows = 0  # of all requests, as planned
        self._sent = torch.cuda.Event()

    def __enter__(self) -> FlashInferPlan:
        self._backend.plan_in_force = self
        return self

    def __exit__(self, *exception: object) -> None:
        self._backend.plan_in_force = None

    def update(self, block_table: Tensor, prefix_bounds: Tensor, rows: int) -> None:
        """See :class:`PrefixPlan`."""
        need, requests = self._need, len(prefix_bounds)
        self._check_size(requests, rows)
        bounds = prefix_bounds.to(torch.int32)
        pages = -(-bounds // need.page_size)
        listed = torch.arange(block_table.shape[1]) < pages[:, None]
        starts = torch.zeros(requests + 1, dtype=torch.int32)
        starts[1:] = pages.cumsum(dim=0)
        self._sent.synchronize()  # the last plan must have left the library's pinned memory
        self._wrapper.plan(
            qo_indptr=torch.arange(0, requests * rows + 1, rows, dtype=torch.int32),
            kv_indptr=starts,
            kv_indices=torch.nn.functional.pad(block_table[listed], (0, 1)),  # an empty list would have no address
            kv_len_arr=bounds,
            num_heads=need.heads,
            head_dim_ckv=need.latent,
            head_dim_kpe=need.rope,
            page_size=need.page_size,
            causal=False,
            sm_scale=self._scale,
            q_data_type=need.query_dtype,
            kv_data_type=need.kv_dtype,
        )
        self._sent.record()
        self._rows = requests * rows

    def attend(self, q_latent: Tensor, q_rope: Tensor, kv_cache: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """``attend_prefix`` under this plan; operands as in :mod:`dcp_compile.ops.mla`."""
        if (len(q_latent), scale) != (self._rows, self._scale):
            raise InvariantError(
                f"flashinfer: {len(q_latent)} rows with scale {scale}, planned for {self._rows} with {self._scale}"
            )
        latent, rope = kv_cache.split([self._need.latent, self._need.rope], dim=-1)
        return self._wrapper.run(
            _dense_rows(q_latent),
            _dense_rows(q_rope),
            latent,
            rope,
            out=torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device),
            return_lse=True,
            return_lse_base_on_e=True,
        )

    def _check_size(self, requests: int, rows: int) -> None:
        pairs = rows * self._need.heads
        tiles = requests * -(-pairs // (128 if pairs > 64 else 64))
        if tiles > MOST_TILES:
            raise BackendError(
                f"flashinfer plans at most {MOST_TILES} tiles of queries; a step of {requests} requests x {rows} rows x "
                f"{self._need.heads} heads has {tiles}: lower prefill_chunk or max_batch_size, or choose another backend"
            )


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    """Scratch memory of one call; calls of all plans run one after another."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _dense_rows(query: Tensor) -> Tensor:
    """The kernel takes any strides of rows and heads, but not of the last dim."""
    return query if query.stride(-1) == 1 else query.contiguous()
