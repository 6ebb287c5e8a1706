# SPDX-License-Identifier: Apache-2.0
"""MLA attention over the last few keys of every request, in plain Triton: one launch, made for latency."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import device
from .mla_rows import LOG2_E, attend, key_lines, log_sum, softmax_step, tile_of

_FEW_KEYS = 128  # one launch without splits is fastest for up to about 64 of them
_CHUNKS = 4


@triton.jit
def _tail(
    q_latent,
    q_rope,
    kv_cache,
    block_table,
    requests,
    starts,
    bounds,
    out,
    lse,
    ql_stride_t,
    ql_stride_h,
    ql_stride_r,
    qr_stride_t,
    qr_stride_h,
    qr_stride_r,
    page_stride,
    token_stride,
    table_stride_b,
    table_stride_w,
    SCALE: tl.constexpr,
    KV_SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    """``BLOCK_H`` heads of one row. Latents are taken in chunks, so that products are short chains that overlap."""
    head_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    row = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    live = (head < HEADS)[:, None]
    request = tl.load(requests + row).to(tl.int64)
    bound = tl.load(bounds + row)
    start = tl.load(starts + request)

    c = tl.arange(0, CHUNK)
    d = tl.arange(0, BLOCK_ROPE)
    whole: tl.constexpr = CHUNK * CHUNKS == LATENT
    query = q_latent + row * ql_stride_t + head[:, None] * ql_stride_h
    ql, acc = (), ()
    for i in tl.static_range(CHUNKS):
        column = (i * CHUNK + c)[None, :]
        mask = live if whole else live & (column < LATENT)
        ql = ql + (tl.load(query + column * ql_stride_r, mask=mask, other=0.0),)
        acc = acc + (tl.zeros([BLOCK_H, CHUNK], tl.float32),)
    if ROPE > 0:
        rope_mask = live & (d < ROPE)[None, :]
        rope = q_rope + row * qr_stride_t + head[:, None] * qr_stride_h + d[None, :] * qr_stride_r
        qr = tl.load(rope, mask=rope_mask, other=0.0)

    top = tl.full([BLOCK_H], float("-inf"), tl.float32)  # running maximum, in units of log 2
    total = tl.zeros([BLOCK_H], tl.float32)
    table_row = block_table + request * table_stride_b
    for key in range(start // BLOCK_N * BLOCK_N, bound, BLOCK_N):
        n = key + tl.arange(0, BLOCK_N)
        base, line = key_lines(
            kv_cache, table_row, key, n, bound, page_stride, token_stride, table_stride_w, PAGE, BLOCK_N
        )
        # What is not seen may hold NaN, and is not loaded.
        seen = (n >= start) & (n < bound)
        there = seen[:, None]
        kl = ()
        for i in tl.static_range(CHUNKS):
            column = (i * CHUNK + c)[None, :]
            here = there if whole else there & (column < LATENT)
            kl = kl + (tl.load(base + line + column, mask=here, other=0.0).to(ql[0].dtype),)
        score = tl.dot(ql[0], tl.trans(kl[0]), input_precision="ieee")
        for i in tl.static_range(1, CHUNKS):
            score += tl.dot(ql[i], tl.trans(kl[i]), input_precision="ieee")
        if ROPE > 0:
            kr = tl.load(base + line + (LATENT + d)[None, :], mask=there & (d < ROPE)[None, :], other=0.0)
            score += tl.dot(qr, tl.trans(kr.to(qr.dtype)), input_precision="ieee")
        score = tl.where(seen[None, :], score * (SCALE * LOG2_E * KV_SCALE), float("-inf"))
        p, decay, top, total = softmax_step(score, top, total)
        old, acc = acc, ()
        for i in tl.static_range(CHUNKS):
            rescaled = old[i] * decay[:, None]
            acc = acc + (tl.dot(p.to(kl[i].dtype), kl[i], rescaled, input_precision="ieee"),)

    weight = (KV_SCALE / tl.where(total > 0, total, 1.0))[:, None]
    item = row * HEADS + head
    for i in tl.static_range(CHUNKS):
        column = (i * CHUNK + c)[None, :]
        mask = live if whole else live & (column < LATENT)
        tl.store(out + item[:, None] * LATENT + column, (acc[i] * weight).to(out.dtype.element_ty), mask=mask)
    tl.store(lse + item, log_sum(top, total), mask=head < HEADS)


def mla_tail(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    requests: Tensor,
    prefix_bounds: Tensor,
    bounds: Tensor,
    scale: float,
    kv_scale: float = 1.0,
    keys: int = 0,
) -> tuple[Tensor, Tensor]:
    """Launcher of ``dcp::mla_tail``: row t attends ``[prefix_bounds[requests[t]], bounds[t])``.

    Arguments and results are those of :func:`dcp_compile.kernels.mla_rows.mla_rows`, with prefix_bounds ``[B]`` int32.
    Right for any length; ``keys`` says about how many keys a row sees at most if they are more than a few, which are then
    split among programs.
    """
    if keys > _FEW_KEYS:
        return attend(
            q_latent, q_rope, kv_cache, block_table, requests, prefix_bounds, bounds, scale, kv_scale, None, keys
        )
    rows, heads, latent = q_latent.shape
    out = q_latent.new_empty(q_latent.shape)
    lse = q_latent.new_empty((rows, heads), dtype=torch.float32)
    if rows * heads == 0:
        return out, lse
    # The smallest tiles, as long as they do not queue.
    few = rows * heads <= 16 * device.multiprocessors(q_latent.device)
    tile = tile_of(16 if few else min(heads, 32), kv_cache.shape[2], q_latent)
    if kv_cache.dtype != q_latent.dtype:
        tile["num_warps"] = 8  # converting keys takes registers
    block_h = tile.pop("BLOCK_M")
    chunk = max(16, triton.next_power_of_2(triton.cdiv(latent, _CHUNKS)))
    _tail[(rows * triton.cdiv(heads, block_h),)](
        q_latent,
        q_rope,
        kv_cache,
        block_table,
        requests,
        prefix_bounds,
        bounds,
        out,
        lse,
        *q_latent.stride(),
        *q_rope.stride(),
        kv_cache.stride(0),
        kv_cache.stride(1),
        *block_table.stride(),
        SCALE=scale,
        KV_SCALE=kv_scale,
        HEADS=heads,
        LATENT=latent,
        ROPE=q_rope.shape[2],
        PAGE=kv_cache.shape[1],
        BLOCK_H=block_h,
        CHUNK=chunk,
        CHUNKS=triton.cdiv(latent, chunk),
        BLOCK_ROPE=max(16, triton.next_power_of_2(q_rope.shape[2])),
        **tile,
    )
    return out, lse
