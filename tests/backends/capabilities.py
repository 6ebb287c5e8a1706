# SPDX-License-Identifier: Apache-2.0
"""Made-up backends and requirements."""

from __future__ import annotations

import math
from typing import Any

import torch

from dcp_compile.backends import AttentionRequirements, BackendCapabilities

ABLE: dict[str, Any] = dict(
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
    graph_safe_without_planning=True,
    max_query_rows=None,
)

NEED = AttentionRequirements(
    device_type="cuda",
    compute_capability=(9, 0),
    query_dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    latent=48,
    rope=24,
    heads=6,
    page_size=32,
    layout="split",
    dcp_size=4,
    interleave=2,
    causal=True,
    query_rows=5,
    ragged=True,
    cuda_graphs=True,
)


def able(**changes: Any) -> BackendCapabilities:
    """Capabilities that satisfy NEED, but for ``changes``."""
    return BackendCapabilities(**{**ABLE, **changes})


class MadeUp:
    """A backend that is never run."""

    def __init__(self, name: str, missing: str | None = None, **changes: Any):
        self.name, self.missing, self.capabilities = name, missing, able(**changes)

    def unavailable(self) -> str | None:
        return self.missing

    def attend_rows(self, *operands): ...

    def attend_prefix(self, *operands): ...

    def attend_tail(self, *operands): ...
