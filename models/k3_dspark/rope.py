# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding of the DSpark drafts: YaRN or plain frequencies, float32 tables."""

import math

import torch
from torch import nn


def _mscale(scale: float, factor: float) -> float:
    """YaRN's magnitude correction m(s) = 0.1 s ln(factor) + 1."""
    return 0.1 * scale * math.log(factor) + 1.0


def inverse_frequencies(dim: int, rope: dict) -> list[float]:
    """Angle per position of each of the dim/2 pairs, in radians, in double precision.

    ``rope`` is a validated ``rope_parameters`` dict. "default": e_i = base^(-2i/dim). "yarn" (Peng et al. 2023): pairs
    that turn more than beta_fast times within the original context keep e_i, those that turn less than beta_slow times
    get e_i / factor, with a linear ramp in the pair index between the two.
    """
    base = rope["rope_theta"]
    plain = [base ** (-2 * i / dim) for i in range(dim // 2)]
    if rope["rope_type"] == "default":
        return plain

    def pair_turning(times: float) -> float:
        return dim * math.log(rope["original_max_position_embeddings"] / (2 * math.pi * times)) / (2 * math.log(base))

    low = max(math.floor(pair_turning(rope.get("beta_fast", 32))), 0)
    high = min(math.ceil(pair_turning(rope.get("beta_slow", 1))), dim - 1)
    frequencies = []
    for i, frequency in enumerate(plain):
        ramp = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
        frequencies.append(frequency / rope["factor"] * ramp + frequency * (1 - ramp))
    return frequencies


def table_multiplier(rope: dict) -> float:
    """Factor on cos and sin: m(mscale) / m(mscale_all_dim), 1 for plain RoPE or an explicit attention_factor of 1."""
    if rope["rope_type"] == "default" or rope.get("attention_factor") is not None:
        return 1.0
    return _mscale(rope.get("mscale", 1.0), rope["factor"]) / _mscale(rope.get("mscale_all_dim", 0.0), rope["factor"])


def softmax_scale(qk_head_dim: int, rope: dict) -> float:
    """qk_head_dim^-0.5 times m(mscale_all_dim)^2; an explicit attention_factor of 1 switches the second factor off."""
    scale = qk_head_dim**-0.5
    if rope["rope_type"] == "default" or rope.get("attention_factor") is not None:
        return scale
    return scale * _mscale(rope.get("mscale_all_dim", 0.0), rope["factor"]) ** 2


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x_2i, x_2i+1) of ``x`` [B, H, S, D] by the angles whose cos and sin are [B, S, D/2].

    Computed in float32 (float64 stays float64).
    """
    cos, sin, wide = cos.unsqueeze(1), sin.unsqueeze(1), x.to(torch.promote_types(x.dtype, cos.dtype))
    even, odd = wide[..., 0::2], wide[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As rotate_pairs, but a pair is (x_i, x_i+D/2)."""
    cos, sin, wide = cos.unsqueeze(1), sin.unsqueeze(1), x.to(torch.promote_types(x.dtype, cos.dtype))
    first, second = wide.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


class DSparkRotaryEmbedding(nn.Module):
    """cos and sin tables [B, S, D/2], float32, for token positions [B, S].

    Positions reach 2^20, where half precision angles are noise: the frequencies stay float32 whatever dtype the model
    is cast to.
    """

    inv_freq: torch.Tensor

    def __init__(self, dim: int, rope: dict):
        super().__init__()
        self._frequencies = inverse_frequencies(dim, rope)
        self.multiplier = table_multiplier(rope)
        self.register_buffer("inv_freq", self.frequencies(), persistent=False)

    def frequencies(self, device: torch.device | None = None) -> torch.Tensor:
        return torch.tensor(self._frequencies, dtype=torch.float32, device=device)

    def _apply(self, fn, recurse=True):
        before = self.inv_freq
        super()._apply(fn, recurse)
        if self.inv_freq is not before:  # what was compiled reads it where it is
            self.inv_freq = self.frequencies(self.inv_freq.device)
        return self

    def forward(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids.unsqueeze(-1).to(torch.float32) * self.inv_freq
        return angles.cos() * self.multiplier, angles.sin() * self.multiplier
