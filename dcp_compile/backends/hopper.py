# SPDX-License-Identifier: Apache-2.0
"""The hopper backend: a warp-specialised Gluon kernel for latent 512 + rope 64 on compute capability 9.0."""

from __future__ import annotations

import importlib.util
import math

import torch
from torch import Tensor

from .contract import BackendCapabilities
from .portable_tail import PortableTail


class HopperBackend(PortableTail):
    """Plan-free, with per-row bounds on the device. The tail of the split layout runs on the portable kernel."""

    name = "hopper"
    capabilities = BackendCapabilities(
        device_types=frozenset({"cuda"}),
        compute_capabilities=frozenset({(9, 0)}),
        query_dtypes=frozenset({torch.bfloat16, torch.float16}),
        kv_dtypes=frozenset({torch.bfloat16, torch.float16}),
        latent_dims=frozenset({512}),
        rope_dims=frozenset({64}),
        head_counts=None,
        page_sizes=frozenset({64, 128, 256, 512}),
        layouts=("flattened", "split"),
        returns_lse=True,
        lse_base=math.e,
        causal_multi_token_dcp=True,
        non_causal_multi_token_dcp=True,
        varlen_dcp=True,
        interleave_above_one=True,
        graph_safe_without_planning=True,
        max_query_rows=None,
    )

    def unavailable(self) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        from ..kernels.device import gluon_unavailable

        return gluon_unavailable() or (None if torch.cuda.is_available() else "no CUDA device")

    def attend_rows(self, *operands: Tensor | float) -> tuple[Tensor, Tensor]:
        from ..kernels.mla_hopper import mla_rows

        return mla_rows(*operands)

    def attend_prefix(self, *operands: Tensor | float) -> tuple[Tensor, Tensor]:
        from ..kernels.mla_hopper import mla_prefix

        return mla_prefix(*operands)
