# SPDX-License-Identifier: Apache-2.0
"""The triton backend: plain Triton kernels with per-row bounds on the device, for any CUDA GPU Triton supports."""

from __future__ import annotations

import importlib.util
import math

import torch
from torch import Tensor

from .contract import BackendCapabilities
from .portable_tail import PortableTail


class TritonBackend(PortableTail):
    """Portable and plan-free: lengths are read on the device, so every call can be captured as it is. Its tail is also
    that of other backends."""

    name = "triton"
    capabilities = BackendCapabilities(
        device_types=frozenset({"cuda"}),
        compute_capabilities=None,
        query_dtypes=frozenset({torch.float32, torch.float16, torch.bfloat16}),
        kv_dtypes=frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn}),
        latent_dims=None,
        rope_dims=None,
        head_counts=None,
        page_sizes=None,
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
        return None if torch.cuda.is_available() else "no CUDA device"

    def attend_rows(self, *operands: Tensor | float) -> tuple[Tensor, Tensor]:
        from ..kernels.mla_rows import mla_rows

        return mla_rows(*operands)

    def attend_prefix(self, *operands: Tensor | float) -> tuple[Tensor, Tensor]:
        from ..kernels.mla_rows import mla_prefix

        return mla_prefix(*operands)
