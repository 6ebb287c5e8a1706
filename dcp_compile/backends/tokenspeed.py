# SPDX-License-Identifier: Apache-2.0
"""The tokenspeed backend: the decode kernel of tokenspeed_mla, on compute capabilities 10.0 and 10.3."""

from __future__ import annotations

import importlib.util
import inspect
import math

import torch
from torch import Tensor

from . import single_rows
from .contract import BackendCapabilities

WORKSPACE_BYTES = 128 << 20  # for one partial result of 128 heads per multiprocessor, of which there are fewer than 400


class TokenSpeedBackend(single_rows.SingleRows):
    """Plan-free, with per-row bounds. It has run on no GPU, nor been checked against an installed library."""

    name = "tokenspeed"
    capabilities = BackendCapabilities(
        device_types=frozenset({"cuda"}),
        compute_capabilities=frozenset({(10, 0), (10, 3)}),
        query_dtypes=frozenset({torch.bfloat16}),
        kv_dtypes=frozenset({torch.bfloat16}),
        latent_dims=frozenset({512}),
        rope_dims=frozenset({64}),
        head_counts=frozenset(range(1, 129)),
        page_sizes=frozenset({64}),
        layouts=("flattened", "split"),
        returns_lse=True,
        lse_base=2.0,
        causal_multi_token_dcp=True,
        non_causal_multi_token_dcp=True,
        varlen_dcp=True,
        interleave_above_one=True,
        graph_safe_without_planning=True,
        max_query_rows=None,
    )

    def unavailable(self) -> str | None:
        if importlib.util.find_spec("tokenspeed_mla") is None:
            return "tokenspeed_mla is not installed"
        try:
            from tokenspeed_mla import tokenspeed_mla_decode
        except ImportError as error:
            return f"tokenspeed_mla cannot be imported: {error}"
        if "local_visible_lens" not in inspect.signature(tokenspeed_mla_decode).parameters:
            return "the installed tokenspeed_mla takes no local_visible_lens; install a newer one"
        return None if torch.cuda.is_available() else "no CUDA device"

    def attend_rows(
        self, q_latent: Tensor, q_rope: Tensor, kv_cache: Tensor, block_table: Tensor, requests: Tensor,
        bounds: Tensor, scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        from tokenspeed_mla import tokenspeed_mla_decode

        page_size = kv_cache.shape[1]
        out, lse = tokenspeed_mla_decode(
            query=single_rows.queries(q_latent, q_rope),
            kv_cache=kv_cache,
            workspace_buffer=single_rows.workspace(WORKSPACE_BYTES, q_latent.device),
            kv_lora_rank=q_latent.shape[-1],
            qk_rope_head_dim=q_rope.shape[-1],
            block_tables=single_rows.page_lists(block_table, requests, page_size),
            seq_lens=bounds,
            max_seq_len=block_table.shape[1] * page_size,
            softmax_scale=scale,
            causal_mask=False,
            local_visible_lens=bounds[:, None],
            return_lse=True,
        )
        return single_rows.without_empty_rows(out, lse * math.log(self.capabilities.lse_base), bounds)
