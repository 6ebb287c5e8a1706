# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention by rows: the recurrent state is read once and written once, whatever the number of rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dcp_compile.ops.kda import L2_EPS

EPS = tl.constexpr(L2_EPS)


@triton.jit
def load_token(q, k, v, g, beta, position, in_k, in_v, live):
    """What the inputs of one token point at, in float32, with its position; padding where not ``live``."""
    return (
        tl.load(q, mask=in_k & live, other=0.0).to(tl.float32),
        tl.load(k, mask=in_k & live, other=0.0).to(tl.float32),
        tl.load(v, mask=in_v & live, other=0.0).to(tl.float32),
        tl.load(g, mask=in_k & live, other=0.0).to(tl.float32),
        tl.load(beta, mask=live, other=0.0).to(tl.float32),
        tl.load(position, mask=live, other=-1) >= 0,
    )


@triton.jit
def normalised(x, valid, L2NORM: tl.constexpr):
    """x, or x / sqrt(sum x^2 + eps); 0 for a padded row, whatever it holds."""
    x = tl.where(valid, x, 0.0)
    if L2NORM:
        x = x / tl.sqrt(tl.sum(x * x, 0) + EPS)
    return x


@triton.jit
def delta_step(state, q, k, v, g, beta):
    """One token on ``state [K, V]``: returns the new state, the correction u ``[V]`` and the output ``[V]``.

    The output is S^T q of the new state S = S' + k u^T, taken as S'^T q + u (k . q): both products then read the
    decayed state S' and do not wait for each other.
    """
    state = state * tl.exp(g)[:, None]
    u = beta * (v - tl.sum(state * k[:, None], 0))
    o = tl.sum(state * q[:, None], 0) + u * tl.sum(k * q, 0)
    return state + k[:, None] * u[None, :], u, o


@triton.jit(do_not_specialize=["rows"])
def _kda(
    q,
    k,
    v,
    g,
    beta,
    state,
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
    slot_stride,
    position_stride_b,
    position_stride_s,
    SCALE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L2NORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    request = tl.program_id(2).to(tl.int64)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    slot = tl.load(state_slots + request * slot_stride).to(tl.int64)
    tile = state + slot * state_stride_n + head * state_stride_h
    tile = tile + i[:, None] * state_stride_k + j[None, :] * state_stride_v
    inside = (i < K)[:, None] & (j < V)[None, :] & (slot >= 0)
    s = tl.load(tile, mask=inside, other=0.0)

    q += request * q_stride_b + head * q_stride_h + i * q_stride_k
    k += request * k_stride_b + head * k_stride_h + i * k_stride_k
    v += request * v_stride_b + head * v_stride_h + j * v_stride_v
    g += request * g_stride_b + head * g_stride_h + i * g_stride_k
    beta += request * beta_stride_b + head * beta_stride_h
    positions += request * position_stride_b
    out += (request * rows * heads + head) * V + j
    touched = False
    q_row, k_row, v_row, g_row, strength, valid = load_token(q, k, v, g, beta, positions, i < K, j < V, rows > 0)
    for row in range(rows):
        q += q_stride_s
        k += k_stride_s
        v += v_stride_s
        g += g_stride_s
        beta += beta_stride_s
        positions += position_stride_s
        following = load_token(q, k, v, g, beta, positions, i < K, j < V, row + 1 < rows)  # under this token's work
        touched = touched | valid
        q_row = normalised(q_row, valid, L2NORM) * SCALE
        k_row = normalised(k_row, valid, L2NORM)
        v_row, g_row = tl.where(valid, v_row, 0.0), tl.where(valid, g_row, 0.0)
        strength = tl.where(valid, strength, 0.0)
        s, _, o = delta_step(s, q_row, k_row, v_row, g_row, strength)
        tl.store(out, o.to(out.dtype.element_ty), mask=j < V)
        out += heads * V
        q_row, k_row, v_row, g_row, strength, valid = following
    tl.store(tile, s, mask=inside & touched)


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    state_slots: Tensor,
    positions: Tensor,
    scale: float,
    qk_l2norm: bool,
) -> Tensor:
    """Launcher of ``dcp::kda``; every valid row is committed into ``state``.

    Args:
        q, k: ``[B, S, H, K]``. v: ``[B, S, H, V]``. g: ``[B, S, H, K]`` log decay. beta: ``[B, S, H]`` after the
            sigmoid.
        state: ``[N, H, K, V]`` float32, updated in place. Slots of one call must differ.
        state_slots: ``[B]``, -1 = padded request. positions: ``[B, S]``, -1 = padded row. All tensors may be strided.

    Returns:
        o ``[B, S, H, V]`` in the dtype of v; 0 in padded rows.
    """
    batch, rows, heads, width = q.shape
    values = v.shape[3]
    out = v.new_empty(v.shape)
    if batch * rows * heads == 0:
        return out
    block_k, block_v = triton.next_power_of_2(width), min(32, triton.next_power_of_2(values))
    _kda[(triton.cdiv(values, block_v), heads, batch)](
        q,
        k,
        v,
        g,
        beta,
        state,
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
        state_slots.stride(0),
        *positions.stride(),
        SCALE=scale,
        K=width,
        V=values,
        L2NORM=qk_l2norm,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=max(1, min(8, block_k * block_v // 2048)),  # 64 registers of state per thread
    )
    return out
