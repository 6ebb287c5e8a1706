# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention of a verify step: commit what was accepted, then run ahead without touching the state."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dcp_compile.errors import CapacityError

from .kda import delta_step, load_token, normalised


@triton.jit(do_not_specialize=["rows"])
def _kda_verify(
    q,
    k,
    v,
    g,
    beta,
    state,
    pending_k,
    pending_u,
    pending_g,
    accepted,
    state_slots,
    positions,
    out,
    rows,
    heads,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    q_stride_k,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    k_stride_k,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    v_stride_v,
    g_stride_b,
    g_stride_s,
    g_stride_h,
    g_stride_k,
    beta_stride_b,
    beta_stride_s,
    beta_stride_h,
    state_stride_n,
    state_stride_h,
    state_stride_k,
    state_stride_v,
    pk_stride_n,
    pk_stride_m,
    pk_stride_h,
    pk_stride_k,
    pu_stride_n,
    pu_stride_m,
    pu_stride_h,
    pu_stride_v,
    pg_stride_n,
    pg_stride_m,
    pg_stride_h,
    pg_stride_k,
    accepted_stride,
    slot_stride,
    position_stride_b,
    position_stride_s,
    SCALE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    RECORDS: tl.constexpr,
    L2NORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    # Programs that share a head all read its records of k and g: a second kernel replaces those, after this one.
    head = tl.program_id(1).to(tl.int64)
    request = tl.program_id(2).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    slot = tl.load(state_slots + request * slot_stride).to(tl.int64)
    held = slot >= 0
    tile = state + slot * state_stride_n + head * state_stride_h
    tile = tile + i[:, None] * state_stride_k + j[None, :] * state_stride_v
    inside = (i < K)[:, None] & (j < V)[None, :] & held
    s = tl.load(tile, mask=inside, other=0.0)

    k_record = pending_k + slot * pk_stride_n + head * pk_stride_h + i * pk_stride_k
    u_record = pending_u + slot * pu_stride_n + head * pu_stride_h + j * pu_stride_v
    g_record = pending_g + slot * pg_stride_n + head * pg_stride_h + i * pg_stride_k
    kept = tl.minimum(tl.maximum(tl.load(accepted + request * accepted_stride), 0), RECORDS)
    kept = tl.where(held, kept, 0)
    for m in range(kept):
        record = tl.cast(m, tl.int64)
        g_row = tl.load(g_record + record * pg_stride_m, mask=i < K, other=0.0)
        k_row = tl.load(k_record + record * pk_stride_m, mask=i < K, other=0.0)
        u_row = tl.load(u_record + record * pu_stride_m, mask=j < V, other=0.0)
        s = s * tl.exp(g_row)[:, None] + k_row[:, None] * u_row[None, :]
    tl.store(tile, s, mask=inside & (kept > 0))
    tl.debug_barrier()  # every thread has read the records before any is replaced

    q += request * q_stride_b + head * q_stride_h + i * q_stride_k
    k += request * k_stride_b + head * k_stride_h + i * k_stride_k
    v += request * v_stride_b + head * v_stride_h + j * v_stride_v
    g += request * g_stride_b + head * g_stride_h + i * g_stride_k
    beta += request * beta_stride_b + head * beta_stride_h
    positions += request * position_stride_b
    out += (request * rows * heads + head) * V + j
    in_v = (j < V) & held
    q_row, k_row, v_row, g_row, strength, valid = load_token(q, k, v, g, beta, positions, i < K, j < V, rows > 0)
    for row in range(rows):
        q += q_stride_s
        k += k_stride_s
        v += v_stride_s
        g += g_stride_s
        beta += beta_stride_s
        positions += position_stride_s
        following = load_token(q, k, v, g, beta, positions, i < K, j < V, row + 1 < rows)  # under this token's work
        q_row = normalised(q_row, valid, L2NORM) * SCALE
        k_row = normalised(k_row, valid, L2NORM)
        v_row, g_row = tl.where(valid, v_row, 0.0), tl.where(valid, g_row, 0.0)
        strength = tl.where(valid, strength, 0.0)
        s, u_row, o = delta_step(s, q_row, k_row, v_row, g_row, strength)
        tl.store(out, o.to(out.dtype.element_ty), mask=j < V)
        tl.store(u_record, u_row, mask=in_v)
        out += heads * V
        u_record += pu_stride_m
        q_row, k_row, v_row, g_row, strength, valid = following
    for _ in range(rows, RECORDS):  # a narrower step leaves neutral records behind
        tl.store(u_record, tl.zeros([BLOCK_V], tl.float32), mask=in_v)
        u_record += pu_stride_m


@triton.jit(do_not_specialize=["rows"])
def _keep_records(
    k,
    g,
    pending_k,
    pending_g,
    state_slots,
    positions,
    rows,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    k_stride_k,
    g_stride_b,
    g_stride_s,
    g_stride_h,
    g_stride_k,
    pk_stride_n,
    pk_stride_m,
    pk_stride_h,
    pk_stride_k,
    pg_stride_n,
    pg_stride_m,
    pg_stride_h,
    pg_stride_k,
    slot_stride,
    position_stride_b,
    position_stride_s,
    K: tl.constexpr,
    L2NORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Normalised keys and log decays of one row and head; zeros for a padded row and past the last one."""
    record = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    request = tl.program_id(2).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    slot = tl.load(state_slots + request * slot_stride).to(tl.int64)
    known = record < rows
    position = tl.load(positions + request * position_stride_b + record * position_stride_s, mask=known, other=-1)
    valid = position >= 0
    row = request * k_stride_b + record * k_stride_s + head * k_stride_h
    k_row = tl.load(k + row + i * k_stride_k, mask=(i < K) & valid, other=0.0).to(tl.float32)
    row = request * g_stride_b + record * g_stride_s + head * g_stride_h
    g_row = tl.load(g + row + i * g_stride_k, mask=(i < K) & valid, other=0.0).to(tl.float32)
    k_row = normalised(k_row, valid, L2NORM)
    kept = (i < K) & (slot >= 0)
    target = slot * pk_stride_n + record * pk_stride_m + head * pk_stride_h
    tl.store(pending_k + target + i * pk_stride_k, k_row, mask=kept)
    target = slot * pg_stride_n + record * pg_stride_m + head * pg_stride_h
    tl.store(pending_g + target + i * pg_stride_k, g_row, mask=kept)


def kda_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    pending_k: Tensor,
    pending_u: Tensor,
    pending_g: Tensor,
    accepted: Tensor,
    state_slots: Tensor,
    positions: Tensor,
    scale: float,
    qk_l2norm: bool,
) -> Tensor:
    """Launcher of ``dcp::kda_verify``; shapes as in :func:`kda`, and:

    Args:
        pending_k, pending_g: ``[N, M, H, K]``, pending_u: ``[N, M, H, V]``, float32, replaced by the S <= M rows of
            this step (zeros after them and in padded rows).
        accepted: ``[B]`` int32 in ``[0, M]``: pending rows that are first committed into ``state``.

    Returns:
        o ``[B, S, H, V]`` in the dtype of v; 0 in padded rows.

    Raises:
        CapacityError: S > M.
    """
    batch, rows, heads, width = q.shape
    values = v.shape[3]
    if rows > pending_k.shape[1]:
        raise CapacityError(
            f"a verify step of {rows} rows does not fit into the {pending_k.shape[1]} records of a state slot; "
            "allocate the records for the widest verify step"
        )
    out = v.new_empty(v.shape)
    if batch * heads == 0:
        return out
    block_k, block_v = triton.next_power_of_2(width), min(32, triton.next_power_of_2(values))
    _kda_verify[(triton.cdiv(values, block_v), heads, batch)](
        q,
        k,
        v,
        g,
        beta,
        state,
        pending_k,
        pending_u,
        pending_g,
        accepted,
        state_slots,
        positions,
        out,
        rows,
        heads,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *g.stride(),
        *beta.stride(),
        *state.stride(),
        *pending_k.stride(),
        *pending_u.stride(),
        *pending_g.stride(),
        accepted.stride(0),
        state_slots.stride(0),
        *positions.stride(),
        SCALE=scale,
        K=width,
        V=values,
        RECORDS=pending_k.shape[1],
        L2NORM=qk_l2norm,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=max(1, min(8, block_k * block_v // 1024)),  # 32 registers of state per thread
    )
    _keep_records[(pending_k.shape[1], heads, batch)](
        k,
        g,
        pending_k,
        pending_g,
        state_slots,
        positions,
        rows,
        *k.stride(),
        *g.stride(),
        *pending_k.stride(),
        *pending_g.stride(),
        state_slots.stride(0),
        *positions.stride(),
        K=width,
        L2NORM=qk_l2norm,
        BLOCK_K=block_k,
        num_warps=1,
    )
    return out
