# SPDX-License-Identifier: Apache-2.0
"""A small K3 DSpark draft and the published configuration, for tests."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from dcp_compile.models.k3_dspark import K3DSparkConfig, K3DSparkModel

PUBLISHED_CONFIG = {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "vocab_size": 163840,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 1048576,
    "rope_theta": 50000.0,
    "num_target_layers": 5,
    "target_hidden_size": 7168,
    "target_num_hidden_layers": 93,
    "target_layer_ids": [2, 23, 47, 71, 89],
    "mask_token_id": 163837,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
    "draft_vocab_size": 163840,
    "torch_dtype": "bfloat16",
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 32768,
        "rope_theta": 50000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def tiny_config(**overrides) -> K3DSparkConfig:
    settings = dict(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        q_lora_rank=24,
        kv_lora_rank=20,
        qk_nope_head_dim=10,
        qk_rope_head_dim=8,
        v_head_dim=12,
        target_hidden_size=28,
        target_layer_ids=[0, 2, 3],
        target_num_hidden_layers=5,
        mask_token_id=60,
        markov_rank=6,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return K3DSparkConfig(**{**settings, **overrides})


def tiny_draft(seed: int, dtype: torch.dtype = torch.float32, attention: str = "sdpa", **overrides) -> K3DSparkModel:
    """A draft whose weights, norms included, are far enough from their initial values to matter."""
    config = tiny_config(**overrides)
    config._attn_implementation = attention
    model = K3DSparkModel(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.25 * noise)
    return model.to(dtype)


def draft_for(
    target: PreTrainedModel, taps: Sequence[int] = (1, 2, 4), seed: int = 0, **overrides
) -> K3DSparkModel:
    """A draft of the target's sizes that reads its layers ``taps``."""
    config = target.config
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "target_layer_ids": list(taps),
        "target_num_hidden_layers": config.num_hidden_layers,
        "mask_token_id": config.vocab_size - 1,
    }
    return tiny_draft(seed, **sizes, **overrides)


def target_heads(model: K3DSparkModel, seed: int) -> tuple[torch.nn.Embedding, torch.nn.Linear]:
    """A target's embedding and output head of matching sizes."""
    generator = torch.Generator().manual_seed(seed)
    config, dtype = model.config, model.dtype
    embed = torch.nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
    head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
    with torch.no_grad():
        for layer in (embed, head):
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
    return embed.requires_grad_(False), head.requires_grad_(False)


def random_taps(model: K3DSparkModel, batch: int, length: int, seed: int) -> torch.Tensor:
    """[batch, length, taps * target hidden]"""
    width = model.config.num_target_layers * model.config.target_hidden_size
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(seed)).to(model.dtype)
