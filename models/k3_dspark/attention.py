# SPDX-License-Identifier: Apache-2.0
"""Attention pieces shared by the DSpark drafts: the eager kernel and the mask of a block."""

import torch
from torch import nn


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [B, H, S, D], key [B, G, T, D], value [B, G, T, Dv], G divides H, additive mask -> [B, S, H, Dv], weights.

    The softmax runs in float32 (float64 stays float64).
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    dtype = torch.promote_types(query.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=dtype).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def block_mask(
    visible: torch.Tensor | None, rows: int, cached: int, is_causal: bool, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Additive mask [B or 1, 1, rows, cached + rows] of a block behind ``cached`` entries; None if nothing is hidden.

    ``visible`` [B, cached + rows], true where an entry may be seen, hides left padding. The rows of a block see each
    other both ways unless ``is_causal``.
    """
    causal = is_causal and rows > 1
    if visible is None and not causal:
        return None
    hidden = torch.zeros(1, 1, rows, cached + rows, dtype=torch.bool, device=device)
    if causal:
        hidden = hidden | torch.ones(rows, cached + rows, dtype=torch.bool, device=device).triu(cached + 1)
    if visible is not None:
        hidden = hidden | ~visible.bool()[:, None, None, :]
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill(hidden, torch.finfo(dtype).min)
