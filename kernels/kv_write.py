# SPDX-License-Identifier: Apache-2.0
"""Writing new latents into the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcp_compile.ops.kv_write import FLOAT8_MAX

FP8_MAX = tl.constexpr(FLOAT8_MAX)


@triton.jit
def _store(
    source, target, stride, FACTOR: tl.constexpr, WIDTH: tl.constexpr, IS_FP8: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    value = tl.load(source + column * stride, mask=column < WIDTH)
    if IS_FP8:
        # Conversions disagree on values out of range (NaN or saturation): saturate, but let a NaN through.
        value = value.to(tl.float32) * FACTOR
        value = tl.minimum(value, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        value = tl.maximum(value, -FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    tl.store(target + column, value.to(target.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _kv_write(
    latent,
    rope,
    kv_cache,
    slots,
    latent_stride_t,
    latent_stride_r,
    rope_stride_t,
    rope_stride_r,
    page_stride,
    token_stride,
    slot_stride,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    FACTOR: tl.constexpr,
    IS_FP8: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row * slot_stride)
    if slot >= 0:
        target = kv_cache + slot // PAGE * page_stride + slot % PAGE * token_stride
        _store(latent + row * latent_stride_t, target, latent_stride_r, FACTOR, LATENT, IS_FP8, BLOCK_LATENT)
        if ROPE > 0:
            _store(rope + row * rope_stride_t, target + LATENT, rope_stride_r, FACTOR, ROPE, IS_FP8, BLOCK_ROPE)


def kv_write(latent: Tensor, rope: Tensor, kv_cache: Tensor, slots: Tensor, kv_scale: float = 1.0) -> None:
    """Launcher of ``dcp::kv_write``: row t goes to ``slots[t]``, rows with a negative slot nowhere.

    Args:
        latent: ``[T, R]``. rope: ``[T, Dr]``. Any strides.
        kv_cache: ``[pages, block_size, R + Dr]`` with unit stride in the last dim, in a float type or float8 e4m3.
        slots: ``[T]`` int64.
        kv_scale: a float8 cache stores ``value / kv_scale``, saturated.
    """
    rows, width = latent.shape
    if rows == 0:
        return
    _kv_write[(rows,)](
        latent,
        rope,
        kv_cache,
        slots,
        *latent.stride(),
        *rope.stride(),
        kv_cache.stride(0),
        kv_cache.stride(1),
        slots.stride(0),
        LATENT=width,
        ROPE=rope.shape[1],
        PAGE=kv_cache.shape[1],
        FACTOR=1 / kv_scale,
        IS_FP8=kv_cache.dtype == torch.float8_e4m3fn,
        BLOCK_LATENT=triton.next_power_of_2(width),
        BLOCK_ROPE=triton.next_power_of_2(max(rope.shape[1], 1)),
        num_warps=2,
    )
