# SPDX-License-Identifier: Apache-2.0
"""A small draft with grouped-query attention, for tests."""

from __future__ import annotations

from typing import Any

import torch

from dcp_compile.models.k3_dspark import DSparkDraftConfig, DSparkDraftModel


def settings(**overrides: Any) -> dict[str, Any]:
    base = dict(
        architectures=["DSparkDraftModel"],
        model_type="qwen3",
        vocab_size=61,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        max_position_embeddings=1024,
        layer_types=["full_attention"] * 2,
        attention_bias=False,
        block_size=7,
        dflash_config={"mask_token_id": 60, "target_layer_ids": [1, 2, 4]},
        num_target_layers=6,
        markov_rank=6,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        rope_parameters={
            "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0
        },
        tie_word_embeddings=False,
        pad_token_id=None,
    )  # fmt: skip
    return base | overrides


def gqa_draft(seed: int, dtype: torch.dtype = torch.float32, **overrides: Any) -> DSparkDraftModel:
    model = DSparkDraftModel(DSparkDraftConfig.from_dict(settings(**overrides))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.25 * noise)
    return model.to(dtype)
