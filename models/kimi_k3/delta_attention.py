# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention (KDA): a gated delta rule with a decay per key channel and a short causal convolution.

The recurrence of one head, state S ``[K, V]``, one token: ``S <- diag(exp g) S``; ``S <- S + k (beta (v - S^T k))^T``;
``o = S^T (scale q)``, with q and k scaled to unit length before. :func:`recurrent_kimi_delta_attention` and
:func:`chunk_kimi_delta_attention` compute it; the layer looks both up in this module at each call.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache

from dcp_compile._compat import recurrent_state

from .configuration import KimiK3Config
from .layers import KimiK3GatedRMSNorm, compute_dtype, island_dtype

L2_EPS = 1e-6
CHUNK = 16


@functools.cache
def _fla() -> ModuleType | None:
    """The delta-rule kernels of flash-linear-attention, which run on GPUs only, or None where not installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    import fla.ops.kda

    return fla.ops.kda


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and _fla() is not None


def _prepare(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, normalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs in the compute dtype, with q and k normalised and q scaled, and the state to start from."""
    dtype = compute_dtype(query)
    query, key, value, g, beta = (x.to(dtype) for x in (query, key, value, g, beta))
    if normalize:
        query, key = (x / (x.square().sum(-1, keepdim=True) + L2_EPS).sqrt() for x in (query, key))
    if initial_state is None:
        batch, _, heads, key_dim = key.shape
        initial_state = value.new_zeros(batch, heads, key_dim, value.shape[-1])
    return query * key.shape[-1] ** -0.5, key, value, g, beta, initial_state.to(dtype)


def recurrent_kimi_delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """KDA token by token.

    Args:
        query, key: ``[batch, seq, heads, K]``; value: ``[batch, seq, heads, V]``.
        g: log decay, ``[batch, seq, heads, K]``, in [-5, 0] on a GPU, where the kernel relies on the bound.
        beta: write strength after the sigmoid, ``[batch, seq, heads]``.
        initial_state: ``[batch, heads, K, V]``, zeros if None.

    Returns:
        output ``[batch, seq, heads, V]`` in the dtype of ``query`` and the final state (float32, or float64 for float64
        inputs), None unless asked for.
    """
    if _has_kernels(query) and not query.requires_grad:  # the recurrent kernel has no backward
        return _fla().fused_recurrent_kda(
            query, key, value, g, beta,
            initial_state=initial_state, output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )  # fmt: skip
    out_dtype = query.dtype
    query, key, value, g, beta, state = _prepare(query, key, value, g, beta, initial_state, use_qk_l2norm_in_kernel)
    outputs = []
    for t in range(key.shape[1]):
        state = state * g[:, t, :, :, None].exp()
        error = beta[:, t, :, None] * (value[:, t] - (state * key[:, t, :, :, None]).sum(-2))
        state = state + key[:, t, :, :, None] * error[..., None, :]
        outputs.append((state * query[:, t, :, :, None]).sum(-2))
    return torch.stack(outputs, dim=1).to(out_dtype), state if output_final_state else None


def chunk_kimi_delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """KDA over many tokens, differentiable; arguments and results as in :func:`recurrent_kimi_delta_attention`.

    Within a chunk the corrections ``u_t = beta_t (v_t - S_t^T k_t)`` solve a unit lower triangular system; between
    chunks only the state is carried. Decays are taken of differences of cumulated logs, so nothing overflows.
    """
    if _has_kernels(query):
        return _fla().chunk_kda(
            query, key, value, g, beta,
            initial_state=initial_state, output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, safe_gate=True,
        )  # fmt: skip
    out_dtype, seq = query.dtype, query.shape[1]
    query, key, value, g, beta, state = _prepare(query, key, value, g, beta, initial_state, use_qk_l2norm_in_kernel)

    size = min(CHUNK, seq)

    def chunks(x: Tensor) -> Tensor:
        """``[batch, seq, heads, dim]`` -> ``[batch, heads, chunk, size, dim]``, the last chunk filled with zeros."""
        return F.pad(x, (0, 0, 0, 0, 0, -seq % size)).unflatten(1, (-1, size)).permute(0, 3, 1, 2, 4)

    query, key, value, g, beta = (chunks(x) for x in (query, key, value, g, beta[..., None]))
    decay = g.cumsum(-2)
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).triu(1)
    between = decay[..., :, None, :] - decay[..., None, :, :]
    decayed_key = key[..., None, :, :] * between.masked_fill(later[..., None], float("-inf")).exp()
    overlap = torch.einsum("bhnijk,bhnik->bhnij", decayed_key, key)
    attention = torch.einsum("bhnijk,bhnik->bhnij", decayed_key, query)

    targets = torch.cat([beta * value, beta * key * decay.exp()], dim=-1)
    solved = torch.linalg.solve_triangular((beta * overlap).tril(-1), targets, upper=False, unitriangular=True)
    own, carried = solved.split([value.shape[-1], key.shape[-1]], dim=-1)

    query = query * decay.exp()
    key = key * (decay[..., -1:, :] - decay).exp()
    kept = decay[..., -1, :, None].exp()
    outputs = []
    for n in range(key.shape[2]):
        correction = own[:, :, n] - carried[:, :, n] @ state
        outputs.append(query[:, :, n] @ state + attention[:, :, n] @ correction)
        state = state * kept[:, :, n] + key[:, :, n].transpose(-1, -2) @ correction
    out = torch.cat(outputs, dim=2)[:, :, :seq].transpose(1, 2)
    return out.to(out_dtype), state if output_final_state else None


class ShortConvolution(nn.Module):
    """Depthwise causal convolution followed by SiLU; the last tap multiplies the current token."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width, dtype=island_dtype()))

    def forward(self, window: Tensor) -> Tensor:
        """``window [batch, channels, width-1+seq]`` -> ``[batch, seq, channels]``."""
        width = self.weight.shape[-1]
        seq = window.shape[-1] - width + 1
        wide, taps = window.to(compute_dtype(window)), self.weight[:, 0, :, None]
        out = sum(wide[..., j : j + seq] * taps[:, j] for j in range(width))
        return F.silu(out).to(window.dtype).transpose(1, 2)


class KimiK3DeltaAttention(nn.Module):
    """KDA layer. Head counts come from the weights, so that a slice of the heads works too."""

    def __init__(self, config: KimiK3Config, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.linear_head_dim
        self.conv_kernel_size = config.linear_conv_kernel_dim
        self.gate_lower_bound = config.gate_lower_bound

        hidden, heads = config.hidden_size, config.linear_num_heads
        inner = heads * self.head_dim
        self.q_proj = nn.Linear(hidden, inner, bias=False)
        self.k_proj = nn.Linear(hidden, inner, bias=False)
        self.v_proj = nn.Linear(hidden, inner, bias=False)
        self.q_conv1d = ShortConvolution(inner, self.conv_kernel_size)
        self.k_conv1d = ShortConvolution(inner, self.conv_kernel_size)
        self.v_conv1d = ShortConvolution(inner, self.conv_kernel_size)
        self.f_a_proj = nn.Linear(hidden, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, inner, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads, dtype=island_dtype()))
        self.dt_bias = nn.Parameter(torch.empty(inner, dtype=island_dtype()))
        self.b_proj = nn.Linear(hidden, heads, bias=False)
        self.g_proj = nn.Linear(hidden, inner, bias=False)
        self.o_norm = KimiK3GatedRMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(inner, hidden, bias=False)

    def log_decay(self, hidden_states: Tensor) -> Tensor:
        """``lower_bound * sigmoid(exp(A_log) * (raw + dt_bias))``, ``[batch, seq, heads, head_dim]`` in float32.

        ``A_log`` has one entry per head, ``dt_bias`` one per channel.
        """
        raw = self.f_b_proj(self.f_a_proj(hidden_states))
        raw = (raw.to(compute_dtype(raw)) + self.dt_bias).unflatten(-1, (-1, self.head_dim))
        return self.gate_lower_bound * torch.sigmoid(self.A_log.exp()[:, None] * raw)

    def forward(self, hidden_states: Tensor, padding_mask: Tensor | None, cache: Cache | None) -> Tensor:
        """``hidden_states [batch, seq, hidden]`` -> the same shape.

        ``padding_mask [batch, seq]`` is 0 at left padding: a zero input leaves the convolution window and the state 0.
        """
        if padding_mask is not None:
            hidden_states = hidden_states * padding_mask[..., None].to(hidden_states.dtype)
        seq = hidden_states.shape[1]
        state = None if cache is None else recurrent_state(cache, self.layer_idx)

        window = torch.cat([proj(hidden_states) for proj in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        window = window.transpose(1, 2)
        if cache is not None:
            window = cache.update_conv_state(window, self.layer_idx, conv_kernel_size=self.conv_kernel_size)
        # The cache returns its history and the new tokens, as many columns of history as it happens to have.
        history = self.conv_kernel_size - 1
        missing = history + seq - window.shape[-1]
        if missing > 0:
            window = torch.cat([window.new_zeros(*window.shape[:2], missing), window], dim=-1)
        window = window[..., -(history + seq) :]
        query, key, value = (
            conv(part).unflatten(-1, (-1, self.head_dim))
            for conv, part in zip((self.q_conv1d, self.k_conv1d, self.v_conv1d), window.chunk(3, dim=1), strict=True)
        )

        beta = self.b_proj(hidden_states)
        delta_rule = recurrent_kimi_delta_attention if state is not None and seq == 1 else chunk_kimi_delta_attention
        out, state = delta_rule(
            query, key, value, g=self.log_decay(hidden_states), beta=beta.to(compute_dtype(beta)).sigmoid(),
            initial_state=state, output_final_state=cache is not None, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        if cache is not None:
            cache.update_recurrent_state(state, self.layer_idx)

        gate = self.g_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        return self.o_proj(self.o_norm(out, gate).flatten(-2))
