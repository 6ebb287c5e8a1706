# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA) of Kimi-K3: no rotary embedding, a sigmoid output gate, a latent cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration import KimiK3Config
from .layers import KimiK3RMSNorm, compute_dtype

# The latent norms do not follow config.rms_norm_eps.
LATENT_NORM_EPS = 1e-6


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Plain attention on ``[batch, heads, seq, dim]``; returns ``[batch, seq, heads, value dim]`` and the weights."""
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1, dtype=compute_dtype(query)).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class KimiK3Attention(nn.Module):
    """MLA layer.

    The cache holds what the heads share: the normed latent ``[batch, 1, seq, kv_lora_rank]`` and the raw extra key
    ``[batch, 1, seq, qk_rope_head_dim]`` (the "rope" part of the name is never rotated). They are expanded to per-head
    keys and values after the cache update. Head counts come from the weights, so that a slice of the heads works too.
    """

    def __init__(self, config: KimiK3Config, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = True
        self.num_key_value_groups = 1
        self.kv_lora_rank = config.kv_lora_rank
        self.qk_nope_head_dim = config.qk_nope_head_dim
        self.qk_rope_head_dim = config.qk_rope_head_dim
        self.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        self.v_head_dim = config.v_head_dim
        self.scaling = self.qk_head_dim**-0.5

        hidden, heads = config.hidden_size, config.num_attention_heads
        self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=False)
        self.q_a_layernorm = KimiK3RMSNorm(config.q_lora_rank, LATENT_NORM_EPS)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * self.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.kv_lora_rank + self.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = KimiK3RMSNorm(self.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(self.kv_lora_rank, heads * (self.qk_nope_head_dim + self.v_head_dim), bias=False)
        self.g_proj = nn.Linear(hidden, heads * self.v_head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.v_head_dim, hidden, bias=False)
        self.own_heads = nn.Identity()  # a part of a model may attend with more heads than it goes on with

    def expand_kv(self, latent: Tensor, shared_key: Tensor) -> tuple[Tensor, Tensor]:
        """Per-head keys and values ``[batch, heads, seq, dim]`` of cached entries ``[batch, 1, seq, ...]``."""
        head_dims = [self.qk_nope_head_dim, self.v_head_dim]
        expanded = self.kv_b_proj(latent).squeeze(1).unflatten(-1, (-1, sum(head_dims))).transpose(1, 2)
        key, value = expanded.split(head_dims, dim=-1)
        return torch.cat([key, shared_key.expand(-1, key.shape[1], -1, -1)], dim=-1), value

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, cache: Cache | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """``hidden_states [batch, seq, hidden]`` -> the same shape, and the attention weights where there are any."""
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query = query.unflatten(-1, (-1, self.qk_head_dim)).transpose(1, 2)

        latent, shared_key = self.kv_a_proj_with_mqa(hidden_states).split(
            [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
        )
        latent, shared_key = self.kv_a_layernorm(latent)[:, None], shared_key[:, None]
        if cache is not None:
            latent, shared_key = cache.update(latent, shared_key, self.layer_idx)
        key, value = self.expand_kv(latent, shared_key)

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        out, weights = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        out = self.own_heads(out).flatten(-2) * torch.sigmoid(self.g_proj(hidden_states))
        return self.o_proj(out), weights
