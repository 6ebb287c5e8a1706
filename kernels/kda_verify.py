# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention of a verify step: commit what was accepted, then run ahead without touching the state.

With S_0 the committed state and G_r the sum of the log decays g up to row r, the rows of a step need no state in between::

    u_r = beta_r (v_r - (k_r exp G_r)^T S_0 - sum_{s<r} L_rs u_s),    L_rs = sum_i k_ri k_si exp(G_ri - G_si)
    o_r =              (q_r exp G_r)^T S_0 + sum_{s<=r} M_rs u_s,     M_rs = sum_i q_ri k_si exp(G_ri - G_si)

Two launches. The first works on keys, queries and decays alone: L, M, the decayed rows, and the weights with which the
records of the last step enter the state; it replaces those records by this step's rows. The second streams the state
through: one read, one write, two products with it per row that wait for nothing, and the u_r one after another.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dcp_compile.errors import CapacityError

from .kda import L2_EPS


@triton.jit
def _prepare(
    q,
    k,
    g,
    pending_k,
    pending_g,
    accepted,
    state_slots,
    positions,
    vectors,
    factors,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    q_stride_k,
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
    accepted_stride,
    slot_stride,
    position_stride_b,
    position_stride_s,
    SCALE: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    RECORDS: tl.constexpr,
    L2NORM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One request and head, in one warp: sums over rows stay within a thread.

    ``vectors [B, H, 1 + RECORDS + 2 ROWS, K]``: the decay of the committed state, the weights of the records, the decayed
    keys and queries. ``factors [B, H, 2, ROWS, ROWS]``: L and M, transposed. Padded rows are zero.
    """
    head = tl.program_id(0).to(tl.int64)
    request = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    r = tl.arange(0, BLOCK_R)
    r64 = r.to(tl.int64)
    slot = tl.load(state_slots + request * slot_stride).to(tl.int64)
    held = slot >= 0
    kept = tl.where(held, tl.minimum(tl.load(accepted + request * accepted_stride), RECORDS), 0)
    in_k = (i < K)[None, :]

    k_records = pending_k + slot * pk_stride_n + head * pk_stride_h
    k_records = k_records + r64[:, None] * pk_stride_m + i[None, :] * pk_stride_k
    g_records = pending_g + slot * pg_stride_n + head * pg_stride_h
    g_records = g_records + r64[:, None] * pg_stride_m + i[None, :] * pg_stride_k
    k_old = tl.load(k_records, mask=(r < kept)[:, None] & in_k, other=0.0)
    g_old = tl.load(g_records, mask=(r < kept)[:, None] & in_k, other=0.0)

    position = tl.load(positions + request * position_stride_b + r64 * position_stride_s, mask=r < ROWS, other=-1)
    valid = (position >= 0)[:, None] & in_k
    q_rows = q + request * q_stride_b + head * q_stride_h + r64[:, None] * q_stride_s + i[None, :] * q_stride_k
    k_rows = k + request * k_stride_b + head * k_stride_h + r64[:, None] * k_stride_s + i[None, :] * k_stride_k
    g_rows = g + request * g_stride_b + head * g_stride_h + r64[:, None] * g_stride_s + i[None, :] * g_stride_k
    q_new = tl.load(q_rows, mask=valid, other=0.0).to(tl.float32)
    k_new = tl.load(k_rows, mask=valid, other=0.0).to(tl.float32)
    g_new = tl.load(g_rows, mask=valid, other=0.0).to(tl.float32)
    if L2NORM:
        q_new = q_new / tl.sqrt(tl.sum(q_new * q_new, 1) + L2_EPS)[:, None]
        k_new = k_new / tl.sqrt(tl.sum(k_new * k_new, 1) + L2_EPS)[:, None]
    q_new *= SCALE

    place = request * tl.num_programs(0) + head
    target = vectors + place * (1 + RECORDS + 2 * ROWS) * K
    tl.store(target + i, tl.exp(tl.sum(g_old, 0)), mask=i < K)
    target += K + r64[:, None] * K + i[None, :]
    tl.store(target, k_old * tl.exp(tl.cumsum(g_old, 0, reverse=True) - g_old), mask=(r < RECORDS)[:, None] & in_k)
    since = tl.cumsum(g_new, 0)
    of_step = (r < ROWS)[:, None] & in_k
    tl.store(target + RECORDS * K, k_new * tl.exp(since), mask=of_step)
    tl.store(target + (RECORDS + ROWS) * K, q_new * tl.exp(since), mask=of_step)
    column = factors + place * 2 * ROWS * ROWS + r
    for row in tl.static_range(ROWS):
        here = (r == row)[:, None]
        k_row = tl.sum(tl.where(here, k_new, 0.0), 0)
        # Rows before this one would have a positive exponent, which may overflow.
        after = tl.minimum(since - tl.sum(tl.where(here, since, 0.0), 0)[None, :], 0.0)
        reach = k_row[None, :] * tl.exp(after)
        tl.store(column, tl.where(r > row, tl.sum(k_new * reach, 1), 0.0), mask=r < ROWS)
        tl.store(column + ROWS * ROWS, tl.where(r >= row, tl.sum(q_new * reach, 1), 0.0), mask=r < ROWS)
        column += ROWS
    tl.debug_barrier()  # every thread has read the records before any is replaced
    replaced = (r < RECORDS)[:, None] & in_k
    tl.store(k_records, k_new, mask=replaced & held)
    tl.store(g_records, g_new, mask=replaced & held)


@triton.jit
def _kda_verify(
    vectors,
    factors,
    v,
    beta,
    state,
    pending_u,
    accepted,
    state_slots,
    positions,
    out,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    v_stride_v,
    beta_stride_b,
    beta_stride_s,
    beta_stride_h,
    state_stride_n,
    state_stride_h,
    state_stride_k,
    state_stride_v,
    pu_stride_n,
    pu_stride_m,
    pu_stride_h,
    pu_stride_v,
    accepted_stride,
    slot_stride,
    position_stride_b,
    position_stride_s,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    RECORDS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One head in one warp: a thread has whole columns of the state, so that no sum leaves it, and takes them a few of their
    numbers (``BLOCK_K``) at a time."""
    head = tl.program_id(1).to(tl.int64)
    request = tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = j < V
    slot = tl.load(state_slots + request * slot_stride).to(tl.int64)
    held = slot >= 0
    kept = tl.where(held, tl.minimum(tl.load(accepted + request * accepted_stride), RECORDS), 0)
    state += slot * state_stride_n + head * state_stride_h + j[:, None] * state_stride_v
    place = request * heads + head
    vectors += place * (1 + RECORDS + 2 * ROWS) * K
    u_records = pending_u + slot * pu_stride_n + head * pu_stride_h + j * pu_stride_v

    nothing = tl.zeros([BLOCK_V], tl.float32)
    from_state, to_out = (), ()
    for _ in tl.static_range(ROWS):
        from_state += (nothing,)
        to_out += (nothing,)
    for first in range(0, K, BLOCK_K):
        i = first + tl.arange(0, BLOCK_K)
        in_k = i < K
        tile = state + i[None, :] * state_stride_k
        inside = in_v[:, None] & in_k[None, :] & held
        s = tl.load(tile, mask=inside, other=0.0) * tl.load(vectors + i, mask=in_k, other=0.0)[None, :]
        for m in range(kept):
            weight = tl.load(vectors + (1 + m) * K + i, mask=in_k, other=0.0)
            s += tl.load(u_records + tl.cast(m, tl.int64) * pu_stride_m, mask=in_v, other=0.0)[:, None] * weight[None, :]
        tl.store(tile, s, mask=inside & (kept > 0))
        rows = vectors + (1 + RECORDS) * K + i
        before, from_state = from_state, ()
        for row in tl.static_range(ROWS):
            from_state += (before[row] + tl.sum(s * tl.load(rows + row * K, mask=in_k, other=0.0)[None, :], 1),)
        before, to_out = to_out, ()
        for row in tl.static_range(ROWS):
            to_out += (before[row] + tl.sum(s * tl.load(rows + (ROWS + row) * K, mask=in_k, other=0.0)[None, :], 1),)
    tl.debug_barrier()  # every thread has read the records before any is replaced

    v += request * v_stride_b + head * v_stride_h + j * v_stride_v
    beta += request * beta_stride_b + head * beta_stride_h
    positions += request * position_stride_b
    out += (request * ROWS * heads + head) * V + j
    factors += place * 2 * ROWS * ROWS
    corrections = ()
    for row in tl.static_range(ROWS):
        valid = tl.load(positions + row * position_stride_s) >= 0
        u = tl.load(v + row * v_stride_s, mask=in_v & valid, other=0.0).to(tl.float32) - from_state[row]
        o = to_out[row]
        for before in tl.static_range(row):
            u -= tl.load(factors + before * ROWS + row) * corrections[before]
            o += tl.load(factors + (ROWS + before) * ROWS + row) * corrections[before]
        u *= tl.load(beta + row * beta_stride_s, mask=valid, other=0.0).to(tl.float32)
        o += tl.load(factors + (ROWS + row) * ROWS + row) * u
        corrections += (u,)
        tl.store(out + row * heads * V, o.to(out.dtype.element_ty), mask=in_v)
        tl.store(u_records + row * pu_stride_m, u, mask=in_v & held)
    for row in tl.static_range(ROWS, RECORDS):  # a narrower step leaves neutral records behind
        tl.store(u_records + row * pu_stride_m, tl.zeros([BLOCK_V], tl.float32), mask=in_v & held)


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
    values, records = v.shape[3], pending_k.shape[1]
    if rows > records:
        raise CapacityError(
            f"a verify step of {rows} rows does not fit into the {records} records of a state slot; "
            "allocate the records for the widest verify step"
        )
    out = v.new_empty(v.shape)
    if batch * heads == 0:
        return out
    vectors = state.new_empty((batch, heads, 1 + records + 2 * rows, width))
    factors = state.new_empty((batch, heads, 2, rows, rows))
    block_k = triton.next_power_of_2(width)
    _prepare[(heads, batch)](
        q,
        k,
        g,
        pending_k,
        pending_g,
        accepted,
        state_slots,
        positions,
        vectors,
        factors,
        *q.stride(),
        *k.stride(),
        *g.stride(),
        *pending_k.stride(),
        *pending_g.stride(),
        accepted.stride(0),
        state_slots.stride(0),
        *positions.stride(),
        SCALE=scale,
        K=width,
        ROWS=rows,
        RECORDS=records,
        L2NORM=qk_l2norm,
        BLOCK_R=triton.next_power_of_2(records),
        BLOCK_K=block_k,
        num_warps=1,
    )
    block_v = min(128, triton.next_power_of_2(values))
    _kda_verify[(triton.cdiv(values, block_v), heads, batch)](
        vectors,
        factors,
        v,
        beta,
        state,
        pending_u,
        accepted,
        state_slots,
        positions,
        out,
        *v.stride(),
        *beta.stride(),
        *state.stride(),
        *pending_u.stride(),
        accepted.stride(0),
        state_slots.stride(0),
        *positions.stride(),
        K=width,
        V=values,
        ROWS=rows,
        RECORDS=records,
        BLOCK_K=min(16, block_k),
        BLOCK_V=block_v,
        num_warps=1,
    )
    return out
