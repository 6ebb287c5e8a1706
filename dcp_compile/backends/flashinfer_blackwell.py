# SPDX-License-Identifier: Apache-2.0
"""The flashinfer_blackwell backend: FlashInfer's CuTe-DSL decode kernel, on compute capabilities 10.0 and 10.3."""

from __future__ import annotations

import importlib.util
import math

import torch
from torch import Tensor

from . import single_rows
from .contract import BackendCapabilities
from .flashinfer_backend import installed_version_problem

WORKSPACE_BYTES = 128 << 20  # what the library calls enough for every size


class FlashInferBlackwellBackend(single_rows.SingleRows):
    """Plan-free, with per-row bounds. It has run on no GPU; its call passes what the library checks beforehand."""

    name = "flashinfer_blackwell"
    capabilities = BackendCapabilities(
        device_types=frozenset({"cuda"}),
        compute_capabilities=frozenset({(10, 0), (10, 3)}),
        query_dtypes=frozenset({torch.bfloat16}),
        kv_dtypes=frozenset({torch.bfloat16}),
        latent_dims=frozenset({512}),
        rope_dims=frozenset({64}),
        head_counts=frozenset(range(1, 129)),
        page_sizes=frozenset({2, 4, 8, 16, 32, 64, 128}),
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
        if (problem := installed_version_problem()) is not None:
            return problem
        if importlib.util.find_spec("cutlass") is None:
            return "nvidia-cutlass-dsl is not installed"
        return None if torch.cuda.is_available() else "no CUDA device"

    def attend_rows(
        self, q_latent: Tensor, q_rope: Tensor, kv_cache: Tensor, block_table: Tensor, requests: Tensor,
        bounds: Tensor, scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla

        page_size = kv_cache.shape[1]
        out, lse = trtllm_batch_decode_with_kv_cache_mla(
            query=single_rows.queries(q_latent, q_rope),
            kv_cache=kv_cache,
            workspace_buffer=single_rows.workspace(WORKSPACE_BYTES, q_latent.device),
            qk_nope_head_dim=128,  # of the form without absorption, which this kernel has no use for
            kv_lora_rank=q_latent.shape[-1],
            qk_rope_head_dim=q_rope.shape[-1],
            block_tables=single_rows.page_lists(block_table, requests, page_size),
            seq_lens=bounds,
            max_seq_len=block_table.shape[1] * page_size,
            bmm1_scale=scale,
            backend="cute-dsl",
            return_lse=True,
        )
        return single_rows.without_empty_rows(out, lse, bounds)
