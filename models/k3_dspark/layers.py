# SPDX-License-Identifier: Apache-2.0
"""What the layers of every DSpark draft are made of, apart from their attention projections."""

import torch
from torch import nn
from transformers import Cache

Tables = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of the rotation, [B, S, rotated dims / 2] float32."""


class DSparkRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), in float32 (float64 stays float64), times the weight."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class DSparkMLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DSparkLayer(nn.Module):
    """Pre-norm attention and MLP around the given attention module."""

    def __init__(self, attention: nn.Module, width: int, inner: int, eps: float):
        super().__init__()
        self.input_layernorm = DSparkRMSNorm(width, eps)
        self.self_attn = attention
        self.post_attention_layernorm = DSparkRMSNorm(width, eps)
        self.mlp = DSparkMLP(width, inner)

    def forward(
        self, x: torch.Tensor, tables: Tables, attention_mask: torch.Tensor | None, cache: Cache | None
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), tables, attention_mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))
