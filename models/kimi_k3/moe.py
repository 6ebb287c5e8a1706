# SPDX-License-Identifier: Apache-2.0
"""Latent mixture of experts of Kimi-K3: routing on the full width, experts in a narrower latent space."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcp_compile._compat import use_experts_implementation

from .configuration import KimiK3Config
from .layers import KimiK3MLP, KimiK3RMSNorm, SituGate, compute_dtype, island_dtype


class KimiK3Router(nn.Module):
    """Sigmoid routing with a selection bias.

    The bias takes part in the choice of experts only; the weights are the unbiased scores, normalised over the chosen
    ones and scaled. Everything is float32, whatever the dtype of ``weight``.
    """

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_token
        self.num_groups = config.num_expert_group
        self.top_groups = config.topk_group
        self.renormalize = config.moe_renormalize
        self.scaling = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts, dtype=island_dtype()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x [tokens, hidden]`` -> expert ids ``[tokens, top_k]`` int64 and their weights, float32."""
        dtype = compute_dtype(x)
        scores = F.linear(x.to(dtype), self.weight.to(dtype)).sigmoid()
        choice = scores + self.e_score_correction_bias
        if self.num_groups > 1:
            choice = self._mask_groups(choice)
        experts = choice.topk(self.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(-1, experts)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * self.scaling

    def _mask_groups(self, choice: Tensor) -> Tensor:
        """Leave only the experts of the best groups; a group scores the sum of its two best experts."""
        groups = choice.unflatten(-1, (self.num_groups, -1))
        best = groups.topk(2, dim=-1).values.sum(-1).topk(self.top_groups, dim=-1, sorted=False).indices
        kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
        return groups.masked_fill(~kept[..., None], float("-inf")).flatten(-2)


@use_experts_implementation
class KimiK3Experts(nn.Module):
    """All experts of one layer: ``gate_up_proj [experts, 2*inter, latent]``, ``down_proj [experts, latent, inter]``.

    ``forward`` is the plain loop; ``config._experts_implementation`` picks a batched or grouped one, which trace.
    """

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        latent, inter = config.routed_expert_hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * inter, latent))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, latent, inter))
        self.act_fn = SituGate(config)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return self.act_fn(*gate_up.chunk(2, dim=-1))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states, dtype=compute_dtype(hidden_states))
        for expert in top_k_index.unique().tolist():
            if expert >= self.num_experts:  # another rank has it
                continue
            token, choice = (top_k_index == expert).nonzero(as_tuple=True)
            y = self._apply_gate(F.linear(hidden_states[token], self.gate_up_proj[expert]))
            y = F.linear(y, self.down_proj[expert]) * top_k_weights[token, choice, None]
            out = out.index_add(0, token, y.to(out.dtype))
        return out.to(hidden_states.dtype)


class KimiK3SparseMoeBlock(nn.Module):
    """Routed experts in the latent space, their sum normalised and projected back, plus the shared experts on ``x``."""

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = KimiK3Router(config)
        self.routed_expert_down_proj = nn.Linear(hidden, latent, bias=False)
        self.experts = KimiK3Experts(config)
        self.routed_expert_norm = KimiK3RMSNorm(latent, config.rms_norm_eps)
        self.routed_expert_up_proj = nn.Linear(latent, hidden, bias=False)
        self.shared_experts = KimiK3MLP(config, config.num_shared_experts * config.moe_intermediate_size)

    @staticmethod
    def complete(*sums: Tensor) -> tuple[Tensor, ...]:
        """The sums over all parts of the experts, when this rank holds a part of them (see parallel_plan.py)."""
        return sums

    def forward(self, x: Tensor) -> Tensor:
        """``x [batch, seq, hidden]`` -> the same shape."""
        tokens = x.reshape(-1, x.shape[-1])
        experts, weights = self.gate(tokens)
        routed = self.experts(self.routed_expert_down_proj(tokens), experts, weights)
        routed, shared = self.complete(routed, self.shared_experts(tokens))
        return (self.routed_expert_up_proj(self.routed_expert_norm(routed)) + shared).view(x.shape)
