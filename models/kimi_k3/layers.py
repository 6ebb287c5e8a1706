# SPDX-License-Identifier: Apache-2.0
"""Small building blocks of Kimi-K3: norms, the SiTU activation and the dense MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .configuration import KimiK3Config


def compute_dtype(x: Tensor) -> torch.dtype:
    """Dtype of the parts that are never computed in low precision: float64 for float64 inputs, else float32."""
    return torch.promote_types(x.dtype, torch.float32)


def island_dtype() -> torch.dtype:
    """Dtype of a parameter that stays float32 in a low-precision model (float64 in a float64 one)."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


class KimiK3RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps)`` over the last dim, rounded to the dtype of ``x`` before the weight is applied."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(compute_dtype(x))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class KimiK3GatedRMSNorm(nn.Module):
    """RMS norm over the last dim times ``sigmoid(gate)``, all in float32; the weight is shared by all heads."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=island_dtype()))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = x.to(compute_dtype(x))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return (normed * torch.sigmoid(gate.to(wide.dtype))).to(x.dtype)


class SituGate:
    """SiTU gate of two inputs: ``beta*tanh(gate/beta) * sigmoid(gate) * cap*tanh(up/cap)``, computed in float32.

    The sigmoid takes the uncapped gate. ``beta`` None or 0 means 1; ``cap`` None leaves ``up`` as it is.
    """

    def __init__(self, config: KimiK3Config) -> None:
        self.beta = config.activation_situ_beta or 1.0
        self.cap = config.activation_situ_linear_beta

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        wide_gate, wide_up = gate.to(compute_dtype(gate)), up.to(compute_dtype(up))
        if self.cap is not None:
            wide_up = self.cap * torch.tanh(wide_up / self.cap)
        return (self.beta * torch.tanh(wide_gate / self.beta) * torch.sigmoid(wide_gate) * wide_up).to(gate.dtype)


class KimiK3MLP(nn.Module):
    """``W_down(situ(W_gate x, W_up x))`` on ``[..., hidden]``."""

    def __init__(self, config: KimiK3Config, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)
        self.act_fn = SituGate(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x), self.up_proj(x)))
