# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention (KDA): the gated delta rule on a slot-indexed state, one token after another.

One token, per head, with state S ``[K, V]``::

    S <- diag(exp g) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T (scale q)

Shapes, with T = B * S rows, request-major: q, k ``[T, 1, H, K]``, v ``[T, 1, H, V]``, g ``[T, 1, H, K]`` log decay,
beta ``[T, 1, H]`` after the sigmoid, state ``[N, H, K, V]`` float32 for N state slots, state_slots ``[B]`` int32 (-1 =
padded request), positions ``[B, S]`` (-1 = padded row: the state passes through it unchanged and its output is 0).
``qk_l2norm`` normalises q and k per head: ``x / sqrt(sum x^2 + 1e-6)``. Everything is computed in float32 (float64 for
float64 inputs).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import compute_dtype, define, fake, reference
from .slots import check_pending, commit_slots, gather_slots

L2_EPS = 1e-6

define(
    "kda(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, Tensor state_slots, Tensor positions, "
    "float scale, bool qk_l2norm) -> Tensor"
)
define(
    "kda_verify(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, Tensor(b!) pending_k, "
    "Tensor(c!) pending_u, Tensor(d!) pending_g, Tensor accepted, Tensor state_slots, Tensor positions, float scale, "
    "bool qk_l2norm) -> Tensor"
)


def l2norm(x: Tensor) -> Tensor:
    """``x / sqrt(sum x^2 + 1e-6)`` over the last dim; the epsilon is on the sum."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + L2_EPS)


def _prepare(q, k, v, g, beta, positions, scale, qk_l2norm):
    """Inputs by request ``[B, S, ...]`` in the compute dtype, q scaled, padded rows neutral (no decay, write or NaN)."""
    dtype = compute_dtype(q.dtype)
    q, k, v, g, beta = (x.reshape(*positions.shape, *x.shape[2:]) for x in (q, k, v, g, beta))
    valid = (positions >= 0)[..., None, None]
    q, k, v, g = (torch.where(valid, x.to(dtype), 0.0) for x in (q, k, v, g))
    beta = torch.where(valid[..., 0], beta.to(dtype), 0.0)
    if qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    return q * scale, k, v, g, beta


def _recur(q, k, v, g, beta, state):
    """Run the rows in order; returns o ``[B, S, H, V]``, corrections u ``[B, S, H, V]`` and the last state."""
    outs, corrections = [], []
    for row in range(q.shape[1]):
        state = state * g[:, row].exp()[..., None]
        u = beta[:, row][..., None] * (v[:, row] - torch.einsum("bhkv,bhk->bhv", state, k[:, row]))
        state = state + k[:, row][..., None] * u[..., None, :]
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, row]))
        corrections.append(u)
    if not outs:
        return torch.empty_like(v), torch.empty_like(v), state
    return torch.stack(outs, dim=1), torch.stack(corrections, dim=1), state


@reference("kda")
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
    """Outputs ``[T, 1, H, V]`` in the dtype of v; every valid row is committed into ``state``."""
    inputs = _prepare(q, k, v, g, beta, positions, scale, qk_l2norm)
    held = gather_slots(state, state_slots).to(inputs[0].dtype)
    out, _, last = _recur(*inputs, held)
    commit_slots(state, state_slots, last)
    return out.reshape(v.shape).to(v.dtype)


def committed_state(state: Tensor, k: Tensor, u: Tensor, g: Tensor, accepted: Tensor) -> Tensor:
    """State after the first ``accepted[b]`` recorded tokens, in closed form.

    ``S_m = diag(exp sum_{t<=m} g_t) S_0 + sum_{t<=m} (k_t * exp(sum_{t<s<=m} g_s)) u_t^T``: storing the corrections u
    instead of v removes the dependence on the states in between.

    Args:
        state: ``[B, H, K, V]``. k, g: ``[B, M, H, K]``. u: ``[B, M, H, V]``. accepted: ``[B]``.
    """
    steps = torch.arange(k.shape[1], device=k.device)
    kept = (steps < accepted[:, None])[..., None, None]
    decay = torch.where(kept, g, 0.0)
    after = decay.sum(dim=1, keepdim=True) - decay.cumsum(dim=1)
    weighted = torch.where(kept, k * after.exp(), 0.0)
    update = torch.einsum("bmhk,bmhv->bhkv", weighted, torch.where(kept, u, 0.0))
    return state * decay.sum(dim=1).exp()[..., None] + update


@reference("kda_verify")
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
    """Commit ``accepted[b]`` pending tokens, then run this step's rows from there and leave them pending.

    Args:
        pending_k, pending_g: ``[N, M, H, K]``, pending_u: ``[N, M, H, V]``: normalised keys, log decays and corrections
            of the previous verify step, replaced by this step's.
        accepted: ``[B]`` int32 in ``[0, M]``.
    """
    check_pending(positions.shape[1], pending_k.shape[1])
    inputs = _prepare(q, k, v, g, beta, positions, scale, qk_l2norm)
    pendings = (pending_k, pending_u, pending_g)
    records = (gather_slots(pool, state_slots).to(inputs[0].dtype) for pool in pendings)
    held = committed_state(gather_slots(state, state_slots).to(inputs[0].dtype), *records, accepted)
    commit_slots(state, state_slots, held)
    out, corrections, _ = _recur(*inputs, held)
    for pool, rows in zip(pendings, (inputs[1], corrections, inputs[3])):
        stored = torch.zeros((rows.shape[0], *pool.shape[1:]), dtype=pool.dtype, device=pool.device)
        stored[:, : rows.shape[1]] = rows
        commit_slots(pool, state_slots, stored)
    return out.reshape(v.shape).to(v.dtype)


@fake("kda")
def _(q, k, v, g, beta, state, state_slots, positions, scale, qk_l2norm):
    return v.new_empty(v.shape)


@fake("kda_verify")
def _(q, k, v, g, beta, state, pending_k, pending_u, pending_g, accepted, state_slots, positions, scale, qk_l2norm):
    return v.new_empty(v.shape)
