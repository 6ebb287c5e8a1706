# SPDX-License-Identifier: Apache-2.0
"""The K3 DSpark draft: a few latent-attention layers over projected target states and a block of mask tokens."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention import eager_attention
from .backbone import DSparkBackbone
from .configuration import K3DSparkConfig
from .layers import DSparkLayer, DSparkRMSNorm, Tables
from .parallel_plan import SHARDING_PLAN
from .rope import DSparkRotaryEmbedding, rotate_pairs, softmax_scale


class K3DSparkAttention(nn.Module):
    """Multi-head latent attention whose cache entry is the normed latent and the rotated shared key."""

    def __init__(self, config: K3DSparkConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = config.is_causal
        self.scaling = softmax_scale(config.qk_head_dim, config.rope_parameters)
        heads = config.num_attention_heads
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = DSparkRMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            config.hidden_size, config.kv_lora_rank + config.qk_rope_head_dim, bias=False
        )
        self.kv_a_layernorm = DSparkRMSNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(heads * config.v_head_dim, config.hidden_size, bias=False)
        self.own_heads = nn.Identity()  # a part of a model may attend with more heads than it goes on with

    def cache_entry(self, x: torch.Tensor, tables: Tables) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B, S, H] -> latent [B, 1, S, R] after its norm, shared key [B, 1, S, Dr] after rotation."""
        compressed = self.kv_a_proj_with_mqa(x).unsqueeze(1)
        latent, k_rope = compressed.split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        return self.kv_a_layernorm(latent), rotate_pairs(k_rope, *tables)

    def expand_kv(self, latent: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """latent [B, 1, T, R], k_rope [B, 1, T, Dr] -> key [B, heads, T, Dn + Dr], value [B, heads, T, Dv]."""
        nope, v_dim = self.config.qk_nope_head_dim, self.config.v_head_dim
        batch, _, entries, _ = latent.shape
        expanded = self.kv_b_proj(latent).view(batch, entries, -1, nope + v_dim).transpose(1, 2)
        k_nope, value = expanded.split([nope, v_dim], dim=-1)
        return torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)), dim=-1), value

    def forward(
        self, x: torch.Tensor, tables: Tables, attention_mask: torch.Tensor | None, cache: Cache | None
    ) -> torch.Tensor:
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query = query.unflatten(-1, (-1, self.config.qk_head_dim)).transpose(1, 2)
        q_nope, q_rope = query.split([self.config.qk_nope_head_dim, self.config.qk_rope_head_dim], dim=-1)
        query = torch.cat((q_nope, rotate_pairs(q_rope, *tables)), dim=-1)

        latent, k_rope = self.cache_entry(x, tables)
        if cache is not None:
            latent, k_rope = cache.update(latent, k_rope, self.layer_idx)
        key, value = self.expand_kv(latent, k_rope)

        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        out, _ = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling)
        return self.o_proj(self.own_heads(out).flatten(2))


class K3DSparkModel(DSparkBackbone):
    """The draft of a Kimi-K3 target (config: ``K3DSparkConfig``). How to step it: see ``DSparkBackbone``."""

    config: K3DSparkConfig
    config_class = K3DSparkConfig
    sharding_plan = SHARDING_PLAN

    def __init__(self, config: K3DSparkConfig):
        super().__init__(config)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.context_proj = nn.Linear(config.num_target_layers * config.target_hidden_size, width, bias=False)
        self.context_norm = DSparkRMSNorm(width, eps)
        self.layers = nn.ModuleList(
            DSparkLayer(K3DSparkAttention(config, i), width, config.intermediate_size, eps)
            for i in range(config.num_hidden_layers)
        )
        self.final_norm = DSparkRMSNorm(width, eps)
        self.rotary_emb = DSparkRotaryEmbedding(config.qk_rope_head_dim, config.rope_parameters)
        self.add_heads()
        self.post_init()
