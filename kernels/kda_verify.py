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

from dcp_compile.ops.slots import check_pending

from .kda import normalised


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
    q_stride_s: tl.constexpr,
    q_stride_h,
    q_stride_k: tl.constexpr,
    k_stride_b,
    k_stride_s: tl.constexpr,
    k_stride_h,
    k_stride_k: tl.constexpr,
    g_stride_b,
    g_stride_s: tl.constexpr,
    g_stride_h,
    g_stride_k: tl.constexpr,
    pk_stride_n,
    pk_stride_m: tl.constexpr,
    pk_stride_h,
    pk_stride_k: tl.constexpr,
    pg_stride_n,
    pg_stride_m: tl.constexpr,
    pg_stride_h,
    pg_stride_k: tl.constexpr,
    accepted_stride,
    slot_stride,
    position_stride_b,
    position_stride_s: tl.constexpr,
    SCALE: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    RECORDS: tl.constexpr,
    L2NORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One request and head, in one warp: of two programs (axis 2) the first makes the vectors and replaces the records,
    the second makes the factors.

    ``vectors [B, H, 2 + RECORDS + 2 ROWS, K]``: the decay of the committed state, the weights of the records, the decayed
    keys and queries, and a row for the second launch. ``factors [B, H, 2, ROWS, ROWS]``: L and M, transposed. Padded
    rows are zero.
    """
    head = tl.program_id(0).to(tl.int64)
    request = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    in_k = i < K
    q += request * q_stride_b + head * q_stride_h + i * q_stride_k
    k += request * k_stride_b + head * k_stride_h + i * k_stride_k
    g += request * g_stride_b + head * g_stride_h + i * g_stride_k
    place = request * tl.num_programs(0) + head

    queries, keys, decays = (), (), ()
    for row in tl.static_range(ROWS):
        valid = tl.load(positions + request * position_stride_b + row * position_stride_s) >= 0
        inside = in_k & valid
        query = tl.load(q + row * q_stride_s, mask=inside, other=0.0).to(tl.float32)
        key = tl.load(k + row * k_stride_s, mask=inside, other=0.0).to(tl.float32)
        queries += (normalised(query, valid, L2NORM) * SCALE,)
        keys += (normalised(key, valid, L2NORM),)
        decays += (tl.load(g + row * g_stride_s, mask=inside, other=0.0).to(tl.float32),)

    if tl.program_id(2) == 0:
        slot = tl.load(state_slots + request * slot_stride).to(tl.int64)
        held = slot >= 0
        kept = tl.where(held, tl.minimum(tl.load(accepted + request * accepted_stride), RECORDS), 0)
        k_records = pending_k + slot * pk_stride_n + head * pk_stride_h + i * pk_stride_k
        g_records = pending_g + slot * pg_stride_n + head * pg_stride_h + i * pg_stride_k
        old_keys, old_decays = (), ()
        for m in tl.static_range(RECORDS):
            old_keys += (tl.load(k_records + m * pk_stride_m, mask=in_k & (m < kept), other=0.0),)
            old_decays += (tl.load(g_records + m * pg_stride_m, mask=in_k & (m < kept), other=0.0),)
        tl.debug_barrier()  # every thread has read the records before any is replaced
        weights = vectors + place * (2 + RECORDS + 2 * ROWS) * K + i
        rows = weights + (1 + RECORDS) * K
        nothing = tl.zeros([BLOCK_K], tl.float32)
        since = nothing
        for m in tl.static_range(RECORDS - 1, -1, -1):
            tl.store(weights + (1 + m) * K, old_keys[m] * tl.exp(since), mask=in_k)
            since += old_decays[m]
        tl.store(weights, tl.exp(since), mask=in_k)
        since = nothing
        for row in tl.static_range(ROWS):
            since += decays[row]
            tl.store(rows + row * K, keys[row] * tl.exp(since), mask=in_k)
            tl.store(rows + (ROWS + row) * K, queries[row] * tl.exp(since), mask=in_k)
            tl.store(k_records + row * pk_stride_m, keys[row], mask=in_k & held)
            tl.store(g_records + row * pg_stride_m, decays[row], mask=in_k & held)
        for row in tl.static_range(ROWS, RECORDS):  # a narrower step leaves neutral records behind
            tl.store(k_records + row * pk_stride_m, nothing, mask=in_k & held)
            tl.store(g_records + row * pg_stride_m, nothing, mask=in_k & held)
    else:
        fades = ()
        for row in tl.static_range(ROWS):
            fades += (tl.exp(decays[row]),)
        columns = factors + place * 2 * ROWS * ROWS
        for before in tl.static_range(ROWS):
            reach = keys[before]
            column = columns + before * ROWS
            tl.store(column + ROWS * ROWS + before, tl.sum(queries[before] * reach, 0))
            for row in tl.static_range(before + 1, ROWS):
                reach *= fades[row]
                tl.store(column + row, tl.sum(keys[row] * reach, 0))
                tl.store(column + ROWS * ROWS + row, tl.sum(queries[row] * reach, 0))


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
    v_stride_s: tl.constexpr,
    v_stride_h,
    v_stride_v: tl.constexpr,
    beta_stride_b,
    beta_stride_s: tl.constexpr,
    beta_stride_h,
    state_stride_n,
    state_stride_h,
    state_stride_k: tl.constexpr,
    state_stride_v: tl.constexpr,
    pu_stride_n,
    pu_stride_m: tl.constexpr,
    pu_stride_h,
    pu_stride_v: tl.constexpr,
    accepted_stride,
    slot_stride,
    position_stride_b,
    position_stride_s,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    RECORDS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One head in one warp: a thread has whole columns of the state, so that no sum leaves it, and takes them a few of their
    numbers (``BLOCK_K``) at a time.

    Every vector is read in steps of one 32-byte sector, by all threads at once: each step would wait for the L2 cache once
    per vector. So one load, of a number per vector, brings the next step's sectors into the L1 cache. What it returns has
    to be used for the load to stay; it ends in a row of ``vectors`` that nothing reads.
    """
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
    VECTORS: tl.constexpr = 1 + RECORDS + 2 * ROWS
    vectors += place * (VECTORS + 1) * K
    u_records = pending_u + slot * pu_stride_n + head * pu_stride_h + j * pu_stride_v

    nothing = tl.zeros([BLOCK_V], tl.float32)
    vector = tl.arange(0, BLOCK_T)
    sectors = vectors + vector * K
    touched = tl.load(sectors, mask=vector < VECTORS, other=0.0)
    from_state, to_out, u_old = (), (), ()
    for _ in tl.static_range(ROWS):
        from_state += (nothing,)
        to_out += (nothing,)
    for m in tl.static_range(RECORDS):
        u_old += (tl.load(u_records + m * pu_stride_m, mask=in_v & (m < kept), other=0.0),)
    inside = in_v[:, None] & held
    first_tile = tl.arange(0, BLOCK_K)[None, :]
    ahead = tl.load(state + first_tile * state_stride_k, mask=inside & (first_tile < K), other=0.0)
    for first in range(0, K, BLOCK_K):
        i = first + tl.arange(0, BLOCK_K)
        in_k = i < K
        more = (vector < VECTORS) & (first + BLOCK_K < K)
        touched += tl.load(sectors + first + BLOCK_K, mask=more, other=0.0)
        s = ahead * tl.load(vectors + i, mask=in_k, other=0.0)[None, :]
        following = (i + BLOCK_K)[None, :]  # is under way while this tile is worked on
        ahead = tl.load(state + following * state_stride_k, mask=inside & (following < K), other=0.0)
        for m in tl.static_range(RECORDS):
            weight = tl.load(vectors + (1 + m) * K + i, mask=in_k & (m < kept), other=0.0)
            s += u_old[m][:, None] * weight[None, :]
        rows = vectors + (1 + RECORDS) * K + i
        before, from_state = from_state, ()
        for row in tl.static_range(ROWS):
            from_state += (before[row] + tl.sum(s * tl.load(rows + row * K, mask=in_k, other=0.0)[None, :], 1),)
        before, to_out = to_out, ()
        for row in tl.static_range(ROWS):
            to_out += (before[row] + tl.sum(s * tl.load(rows + (ROWS + row) * K, mask=in_k, other=0.0)[None, :], 1),)
        tl.store(state + i[None, :] * state_stride_k, s, mask=inside & in_k[None, :] & (kept > 0))

    tl.store(vectors + VECTORS * K + vector, touched, mask=vector < K)

    v += request * v_stride_b + head * v_stride_h + j * v_stride_v
    beta += request * beta_stride_b + head * beta_stride_h
    positions += request * position_stride_b
    out += (request * ROWS * heads + head) * V + j
    factors += place * 2 * ROWS * ROWS
    corrections, outputs = (), ()
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
        outputs += (o,)
    # Stores come last: a load may not be moved before a store, whose memory might be the same.
    for row in tl.static_range(ROWS):
        tl.store(out + row * heads * V, outputs[row].to(out.dtype.element_ty), mask=in_v)
        tl.store(u_records + row * pu_stride_m, corrections[row], mask=in_v & held)
    for row in tl.static_range(ROWS, RECORDS):  # a narrower step leaves neutral records behind
        tl.store(u_records + row * pu_stride_m, nothing, mask=in_v & held)


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
    check_pending(rows, records)
    out = v.new_empty(v.shape)
    if batch * heads == 0:
        return out
    vectors = state.new_empty((batch, heads, 2 + records + 2 * rows, width))
    factors = state.new_empty((batch, heads, 2, rows, rows))
    block_k = triton.next_power_of_2(width)
    _prepare[(heads, batch, 2)](
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
        BLOCK_K=min(8, block_k),
        BLOCK_T=triton.next_power_of_2(1 + records + 2 * rows),
        BLOCK_V=block_v,
        num_warps=1,
    )
    return out
