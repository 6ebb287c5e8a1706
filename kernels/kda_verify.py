# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention of a verify step: commit what was accepted, then run ahead without touching the state."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dcp_compile.errors import CapacityError

from .kda import L2_EPS


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
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """All rows of one request and head at once; with G_r the sum of g up to row r, S_0 the committed state, L and M below::

        u_r = beta_r (v_r - (k_r exp G_r)^T S_0 - sum_{s<r} L_rs u_s),    L_rs = sum_i k_ri k_si exp(G_ri - G_si)
        o_r =              (q_r exp G_r)^T S_0 + sum_{s<=r} M_rs u_s,     M_rs = sum_i q_ri k_si exp(G_ri - G_si)

    so the state meets two small matrix products, and the corrections are u = (1 + diag(beta) L)^-1 beta (v - ...).
    """
    head = tl.program_id(0).to(tl.int64)
    request = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    r = tl.arange(0, BLOCK_R)
    r64 = r.to(tl.int64)
    slot = tl.load(state_slots + request * slot_stride).to(tl.int64)
    held = slot >= 0
    kept = tl.minimum(tl.maximum(tl.load(accepted + request * accepted_stride), 0), RECORDS)
    kept = tl.where(held, kept, 0)

    k_records = pending_k + slot * pk_stride_n + head * pk_stride_h
    k_records = k_records + r64[:, None] * pk_stride_m + i[None, :] * pk_stride_k
    g_records = pending_g + slot * pg_stride_n + head * pg_stride_h
    g_records = g_records + r64[:, None] * pg_stride_m + i[None, :] * pg_stride_k
    recorded = (r < kept)[:, None] & (i < K)[None, :]
    k_old = tl.load(k_records, mask=recorded, other=0.0)
    g_old = tl.load(g_records, mask=recorded, other=0.0)
    decay = tl.exp(tl.sum(g_old, 0))
    weights = tl.trans(k_old * tl.exp(tl.cumsum(g_old, 0, reverse=True) - g_old))  # decayed by what came after each

    given = r < rows
    position = tl.load(positions + request * position_stride_b + r64 * position_stride_s, mask=given, other=-1)
    valid = position >= 0
    in_row = valid[:, None] & (i < K)[None, :]
    q_rows = q + request * q_stride_b + head * q_stride_h + r64[:, None] * q_stride_s + i[None, :] * q_stride_k
    k_rows = k + request * k_stride_b + head * k_stride_h + r64[:, None] * k_stride_s + i[None, :] * k_stride_k
    g_rows = g + request * g_stride_b + head * g_stride_h + r64[:, None] * g_stride_s + i[None, :] * g_stride_k
    q_new = tl.load(q_rows, mask=in_row, other=0.0).to(tl.float32)
    k_new = tl.load(k_rows, mask=in_row, other=0.0).to(tl.float32)
    g_new = tl.load(g_rows, mask=in_row, other=0.0).to(tl.float32)
    beta_rows = beta + request * beta_stride_b + head * beta_stride_h + r64 * beta_stride_s
    strength = tl.load(beta_rows, mask=valid, other=0.0).to(tl.float32)
    if L2NORM:
        q_new = q_new / tl.sqrt(tl.sum(q_new * q_new, 1) + L2_EPS)[:, None]
        k_new = k_new / tl.sqrt(tl.sum(k_new * k_new, 1) + L2_EPS)[:, None]
    q_new *= SCALE
    tl.debug_barrier()  # every thread has read the records before any is replaced
    replaced = (r < RECORDS)[:, None] & (i < K)[None, :] & held
    tl.store(k_records, k_new, mask=replaced)
    tl.store(g_records, g_new, mask=replaced)

    since = tl.cumsum(g_new, 0)
    same = (r[:, None] == r[None, :]).to(tl.float32)
    inverse, mixed = same, tl.zeros([BLOCK_R, BLOCK_R], tl.float32)
    for row in range(rows):
        here = (r == row)[:, None]
        k_row = tl.sum(tl.where(here, k_new, 0.0), 0)
        # Rows before this one have a positive exponent, which may overflow, and are masked below.
        reach = k_row[None, :] * tl.exp(tl.minimum(since - tl.sum(tl.where(here, since, 0.0), 0)[None, :], 0.0))
        lower = tl.where(r > row, tl.sum(k_new * reach, 1) * strength, 0.0)
        inverse -= lower[:, None] * tl.sum(tl.where(here, inverse, 0.0), 0)[None, :]
        upon = tl.where(r >= row, tl.sum(q_new * reach, 1), 0.0)
        mixed = tl.where((r == row)[None, :], upon[:, None], mixed)
    k_new *= tl.exp(since)
    q_new *= tl.exp(since)

    state += slot * state_stride_n + head * state_stride_h
    pending_u += slot * pu_stride_n + head * pu_stride_h
    v += request * v_stride_b + head * v_stride_h
    out += (request * rows * heads + head) * V
    for first in range(0, V, BLOCK_V):
        j = first + tl.arange(0, BLOCK_V)
        tile = state + i[:, None] * state_stride_k + j[None, :] * state_stride_v
        inside = (i < K)[:, None] & (j < V)[None, :] & held
        u_records = pending_u + r64[:, None] * pu_stride_m + j[None, :] * pu_stride_v
        u_old = tl.load(u_records, mask=(r < kept)[:, None] & (j < V)[None, :], other=0.0)
        s = tl.load(tile, mask=inside, other=0.0) * decay[:, None]
        s = tl.dot(weights, u_old, s, input_precision="tf32x3")
        tl.store(tile, s, mask=inside & (kept > 0))
        v_new = tl.load(
            v + r64[:, None] * v_stride_s + j[None, :] * v_stride_v, mask=valid[:, None] & (j < V)[None, :], other=0.0
        )
        u = (v_new.to(tl.float32) - tl.dot(k_new, s, input_precision="tf32x3")) * strength[:, None]
        u = tl.dot(inverse, u, input_precision="tf32x3")
        o = tl.dot(q_new, s, input_precision="tf32x3")
        o = tl.dot(mixed, u, o, input_precision="tf32x3")
        tl.store(
            out + r64[:, None] * heads * V + j[None, :],
            tl.where(valid[:, None], o, 0.0).to(out.dtype.element_ty),
            mask=given[:, None] & (j < V)[None, :],
        )
        tl.debug_barrier()
        tl.store(u_records, u, mask=(r < RECORDS)[:, None] & (j < V)[None, :] & held)


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
    records = pending_k.shape[1]
    _kda_verify[(heads, batch)](
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
        RECORDS=records,
        L2NORM=qk_l2norm,
        BLOCK_R=max(16, triton.next_power_of_2(records)),  # matrix products have at least 16 rows
        BLOCK_K=max(16, triton.next_power_of_2(width)),
        BLOCK_V=max(16, min(32, triton.next_power_of_2(values))),
        num_warps=4,
    )
    return out
