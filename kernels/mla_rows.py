# SPDX-License-Identifier: Apache-2.0
"""Partial MLA attention over paged latents, in plain Triton: any GPU, any sizes, bounds read on the device."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import device
from .merge import merge_into
from .splits import split_count

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def key_lines(
    kv_cache, table_row, key, n, end, page_stride, token_stride, table_stride_w, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Where keys ``n`` lie, which are BLOCK_N from ``key`` on: a pointer, and offsets ``[BLOCK_N, 1]`` from it. The pages of
    keys from ``end`` on are not looked up."""
    if PAGE % BLOCK_N == 0:  # the block lies in one page
        base = kv_cache + tl.load(table_row + key // PAGE * table_stride_w).to(tl.int64) * page_stride
        line = (n % PAGE * token_stride)[:, None]
    else:
        page = tl.load(table_row + n // PAGE * table_stride_w, mask=n < end, other=0)
        base = kv_cache
        line = (page.to(tl.int64) * page_stride + n % PAGE * token_stride)[:, None]
    return base, line


@triton.jit
def softmax_step(score, top, total):
    """One block of a running softmax, in units of log 2: P, what earlier blocks are to be multiplied by, maximum and sum."""
    new_top = tl.maximum(top, tl.max(score, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(score - shift[:, None])
    decay = tl.exp2(top - shift)
    return p, decay, new_top, total * decay + tl.sum(p, 1)


@triton.jit
def log_sum(top, total):
    """Natural logarithm of what was summed; -inf where nothing was."""
    some = total > 0
    return tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN_2, float("-inf"))


@triton.jit(do_not_specialize=["rows", "group_rows"])
def _mla(
    q_latent,
    q_rope,
    kv_cache,
    block_table,
    requests,
    starts,
    bounds,
    out,
    lse,
    rows,
    group_rows,
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
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    """One tile of ``BLOCK_M`` (row, head) pairs out of a group of rows, and one split of the keys.

    A group is meant to be the rows of one request, which share its keys. Whatever the row -> request map, the tile
    visits each request between its smallest and largest one and masks the rows of the others.
    """
    group_tiles = tl.cdiv(group_rows * HEADS, BLOCK_M)
    group = tl.program_id(0) // group_tiles
    pair = tl.program_id(0) % group_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    row = group * group_rows + pair // HEADS
    head = pair % HEADS
    live = (pair < group_rows * HEADS) & (row < rows)
    if requests is not None:
        request = tl.load(requests + row, mask=live, other=-1)
        bound = tl.load(bounds + row, mask=live, other=0)
    else:
        request = tl.where(live, group, -1)
        bound = tl.load(bounds + request, mask=live, other=0)

    c = tl.arange(0, BLOCK_LATENT)
    d = tl.arange(0, BLOCK_ROPE)
    row64 = row.to(tl.int64)
    latent_mask = live[:, None] & (c < LATENT)[None, :]
    ql = tl.load(
        q_latent + row64[:, None] * ql_stride_t + head[:, None] * ql_stride_h + c[None, :] * ql_stride_r,
        mask=latent_mask,
        other=0.0,
    )
    if ROPE > 0:
        qr = tl.load(
            q_rope + row64[:, None] * qr_stride_t + head[:, None] * qr_stride_h + d[None, :] * qr_stride_r,
            mask=live[:, None] & (d < ROPE)[None, :],
            other=0.0,
        )

    factor = SCALE * LOG2_E * KV_SCALE
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)  # running maximum, in units of log 2
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_LATENT], tl.float32)
    first_request = tl.min(tl.where(live, request, 2147483647), 0)
    last_request = tl.max(request, 0)
    for current in range(first_request, last_request + 1):
        seen = tl.where(request == current, bound, 0)
        longest = tl.max(seen, 0)
        start, aligned = 0, 0
        if starts is not None:
            start = tl.load(starts + current)
            aligned = start // BLOCK_N * BLOCK_N
        share = tl.cdiv(tl.cdiv(tl.maximum(longest - aligned, 0), tl.num_programs(1)), BLOCK_N) * BLOCK_N
        low = aligned + tl.program_id(1) * share
        high = tl.minimum(low + share, longest)
        table_row = block_table + tl.cast(current, tl.int64) * table_stride_b
        for key in range(low, high, BLOCK_N):
            n = key + tl.arange(0, BLOCK_N)
            base, line = key_lines(
                kv_cache, table_row, key, n, high, page_stride, token_stride, table_stride_w, PAGE, BLOCK_N
            )
            # What no row sees may hold NaN, and is not loaded.
            there = (n >= start) & (n < high)
            k = tl.load(base + (line + c[None, :]), mask=there[:, None] & (c < LATENT)[None, :], other=0.0)
            k = k.to(ql.dtype)
            score = tl.dot(ql, tl.trans(k), input_precision="ieee")
            if ROPE > 0:
                kr = tl.load(
                    base + (line + (LATENT + d)[None, :]),
                    mask=there[:, None] & (d < ROPE)[None, :],
                    other=0.0,
                )
                score = tl.dot(qr, tl.trans(kr.to(qr.dtype)), score, input_precision="ieee")
            visible = (n[None, :] < seen[:, None]) & there[None, :]
            score = tl.where(visible, score * factor, float("-inf"))
            p, decay, top, total = softmax_step(score, top, total)
            acc = tl.dot(p.to(k.dtype), k, acc * decay[:, None], input_precision="ieee")

    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None] * KV_SCALE
    target = (tl.program_id(1).to(tl.int64) * rows + row64) * HEADS + head
    if SPLIT:
        latent_mask = latent_mask & some[:, None]  # the merge does not use an empty part
    tl.store(out + target[:, None] * LATENT + c[None, :], acc.to(out.dtype.element_ty), mask=latent_mask)
    tl.store(lse + target, log_sum(top, total), mask=live)


def tile_of(pairs: int, width: int, q_latent: Tensor) -> dict[str, int]:
    """The tile for ``pairs`` (row, head) pairs, or the largest that the device has the shared memory for.

    A tile holds its queries and two stages of keys, ``width`` numbers each; one stage where two do not fit into the
    smallest. Larger ones, and float32 in any but the smallest, run out of registers.
    """
    exact = q_latent.dtype == torch.float32
    block_n = 16 if exact else 32
    limit, line = device.shared_memory(q_latent.device), width * q_latent.element_size()
    for block_m, num_warps in () if exact else ((64, 8), (32, 8)):
        if pairs > block_m // 2 and (block_m + 2 * block_n) * line <= limit:
            return dict(BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps, num_stages=2)
    stages = 2 if (16 + 2 * block_n) * line <= limit else 1
    return dict(BLOCK_M=16, BLOCK_N=block_n, num_warps=4, num_stages=stages)


def attend(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    requests: Tensor | None,
    starts: Tensor | None,
    bounds: Tensor,
    scale: float,
    kv_scale: float,
    splits: int | None,
    keys: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The launch behind this file's calls, which say what the arguments are.

    ``starts [B]``: keys before them are not seen; None: all are. ``keys``: about how many a row sees at most; None: as many
    as the block table can hold.
    """
    rows, heads, latent = q_latent.shape
    out = q_latent.new_empty(q_latent.shape)
    lse = q_latent.new_empty((rows, heads), dtype=torch.float32)
    if rows * heads == 0:
        return out, lse
    group_rows = max(rows // block_table.shape[0], 1)
    pairs = group_rows * heads
    most_pairs = 64 if kv_cache.dtype == q_latent.dtype else 32  # converting keys takes registers
    tile = tile_of(min(pairs, most_pairs), kv_cache.shape[2], q_latent)
    tiles = triton.cdiv(rows, group_rows) * triton.cdiv(pairs, tile["BLOCK_M"])
    if splits is None:
        keys = keys or block_table.shape[1] * kv_cache.shape[1]
        splits = split_count(tiles, keys, device.multiprocessors(q_latent.device))
    part_out, part_lse = out, lse
    if splits > 1:
        part_out = out.new_empty((splits, rows, heads, latent), dtype=torch.float32)
        part_lse = lse.new_empty((splits, rows, heads))
    _mla[(tiles, splits)](
        q_latent,
        q_rope,
        kv_cache,
        block_table,
        requests,
        starts,
        bounds,
        part_out,
        part_lse,
        rows,
        group_rows,
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
        SPLIT=splits > 1,
        BLOCK_LATENT=max(16, triton.next_power_of_2(latent)),
        BLOCK_ROPE=max(16, triton.next_power_of_2(q_rope.shape[2])),
        **tile,
    )
    if splits > 1:
        merge_into(part_out, part_lse, out, lse)
    return out, lse


def mla_rows(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    requests: Tensor,
    bounds: Tensor,
    scale: float,
    kv_scale: float = 1.0,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Launcher of ``dcp::mla_rows``: row t attends the local keys ``[0, bounds[t])`` of request ``requests[t]``.

    Any row -> request map is right; rows of one request next to each other share its keys.

    Args:
        q_latent: ``[T, H, R]``. q_rope: ``[T, H, Dr]``. Any strides, float32, float16 or bfloat16.
        kv_cache: ``[pages, block_size, R + Dr]`` with unit stride in the last dim; that type or float8 e4m3.
        block_table: ``[B, columns]`` int32. requests, bounds: ``[T]`` int32.
        kv_scale: what the values of the cache are multiplied by.
        splits: programs that share the keys of a row; None chooses from the shapes.

    Returns:
        ``(out [T, H, R] in the dtype of q_latent, lse [T, H] float32)``, natural logarithm; 0 and -inf for an empty
        row.
    """
    return attend(q_latent, q_rope, kv_cache, block_table, requests, None, bounds, scale, kv_scale, splits)


def mla_prefix(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    prefix_bounds: Tensor,
    scale: float,
    kv_scale: float = 1.0,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Launcher of ``dcp::mla_prefix``: each of the T / B rows of request b attends ``[0, prefix_bounds[b])``.

    Arguments and results are those of :func:`mla_rows`, with prefix_bounds ``[B]`` int32.
    """
    return attend(q_latent, q_rope, kv_cache, block_table, None, None, prefix_bounds, scale, kv_scale, splits)
