# SPDX-License-Identifier: Apache-2.0
"""The torch backend: the reference functions of :mod:`dcp_compile.ops.mla`. It reads lengths on the host."""

from __future__ import annotations

import math

from ..ops import mla
from .contract import BackendCapabilities


class TorchBackend:
    """Runs anywhere, at the speed of plain torch."""

    name = "torch"
    capabilities = BackendCapabilities(
        device_types=frozenset({"cpu", "cuda"}),
        compute_capabilities=None,
        query_dtypes=None,
        kv_dtypes=None,
        latent_dims=None,
        rope_dims=None,
        head_counts=None,
        page_sizes=None,
        layouts=("split", "flattened"),
        returns_lse=True,
        lse_base=math.e,
        causal_multi_token_dcp=True,
        non_causal_multi_token_dcp=True,
        varlen_dcp=True,
        interleave_above_one=True,
        graph_safe_without_planning=False,
        max_query_rows=None,
    )
    attend_rows = staticmethod(mla.attend_rows)
    attend_prefix = staticmethod(mla.attend_prefix)
    attend_tail = staticmethod(mla.attend_tail)

    def unavailable(self) -> str | None:
        return None
