# SPDX-License-Identifier: Apache-2.0
"""MXFP4: four-bit floats (sign and E2M1) with one power-of-two scale (E8M0) per 32 input columns.

A byte of a packed row holds column 2j in its low and 2j+1 in its high nibble; a nibble is a sign bit over a 3-bit index
into 0, .5, 1, 1.5, 2, 3, 4, 6; a scale byte s stands for ``2 ** (s - 127)``, 255 for NaN. Source: OCP Microscaling
Formats 1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
# Exponent of the largest magnitude: a group whose maximum lies in [2^e, 2^(e+1)) gets the scale 2^(e-2).
_TOP_EXPONENT = 2
_TINY = torch.finfo(torch.float32).tiny


def decode(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Weights ``[..., columns]`` of ``packed [..., columns/2]`` and ``scale [..., columns/32]``, both uint8.

    Exact in float32, float64 and bfloat16 (short of an overflow at the largest scales).

    Raises:
        ValueError: another dtype than uint8, or shapes that do not belong together.
    """
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(f"packed is {packed.dtype} and scale {scale.dtype}; MXFP4 stores both as uint8")
    if packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] * 2 != scale.shape[-1] * GROUP:
        raise ValueError(
            f"packed {list(packed.shape)} does not fit scale {list(scale.shape)}: a scale covers {GROUP // 2} bytes"
        )
    work = torch.promote_types(dtype, torch.float32)
    values = torch.tensor(_MAGNITUDES + tuple(-m for m in _MAGNITUDES), dtype=work, device=packed.device)
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)
    grouped = values[codes.long()].unflatten(-1, (-1, GROUP))
    return (grouped * _scale_values(scale, work)[..., None]).flatten(-2).to(dtype)


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``packed [..., columns/2]`` and ``scale [..., columns/32]``, uint8, nearest to ``weight [..., columns]``.

    Of the two scales around the maximum of a group, the one that keeps it in range and the next smaller one that clips
    it, the one with the smaller squared error is taken. Ties between two codes go to the even one. What
    :func:`decode` returned is encoded without loss.

    Raises:
        ValueError: the columns are no multiple of 32, or a weight is not finite.
    """
    if weight.shape[-1] % GROUP:
        raise ValueError(f"{weight.shape[-1]} columns are not a multiple of {GROUP}, the group MXFP4 scales together")
    if not torch.isfinite(weight).all():
        raise ValueError("weight has entries that are not finite; MXFP4 cannot hold them")
    groups = weight.to(torch.promote_types(weight.dtype, torch.float32)).unflatten(-1, (-1, GROUP))
    maximum = groups.abs().amax(-1, keepdim=True)
    exponent = torch.frexp(maximum[..., 0]).exponent - 1 - _TOP_EXPONENT
    tight = (exponent + _BIAS).clamp(0, 254).to(torch.uint8)
    wide = (exponent + _BIAS + 1).clamp(0, 254).to(torch.uint8)

    codes, errors = [], []
    for scale in (tight, wide):
        code, magnitude = _round(groups, scale)
        codes.append(code)
        errors.append(((groups.abs() - magnitude) / maximum.clamp_min(_TINY)).square().sum(-1))
    better = errors[1] < errors[0]
    scale = torch.where(better, wide, tight)
    code = torch.where(better[..., None], codes[1], codes[0]).flatten(-2)
    return code[..., 0::2] | (code[..., 1::2] << 4), scale


def _scale_values(scale: Tensor, dtype: torch.dtype) -> Tensor:
    powers = torch.exp2(torch.arange(256, dtype=torch.float64, device=scale.device) - _BIAS)
    powers[255] = float("nan")
    return powers.to(dtype)[scale.long()]


def _round(groups: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of ``groups [..., groups, 32]`` under ``scale`` and the magnitudes they stand for."""
    factor = _scale_values(scale, groups.dtype)[..., None]
    magnitudes = torch.tensor(_MAGNITUDES, dtype=groups.dtype, device=groups.device)
    bounds = (magnitudes[1:] + magnitudes[:-1]) / 2
    bounds[1::2] = torch.nextafter(bounds[1::2], torch.zeros_like(bounds[1::2]))  # a tie below an even code goes up
    index = torch.bucketize(groups.abs() / factor, bounds)
    return (index + 8 * (groups < 0)).to(torch.uint8), magnitudes[index] * factor
