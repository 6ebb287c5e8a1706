# SPDX-License-Identifier: Apache-2.0
"""Kimi-K3 written a second time, as plainly as possible: float64, one token at a time, no fused anything.

It reads a checkpoint by its official tensor names and shares no code with the model. MLA attends in the latent space
(absorbed), KDA runs its recurrence, experts are looped over. ``Slip`` names one deliberate mistake each: a model that
made it would differ from this reference, which is how the comparison is shown to be sensitive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SLIPS = (
    # latent attention
    "latent norms use rms_norm_eps",
    "extra key left out",
    "extra key normed",
    "scale of the content dims only",
    "no output gate in MLA",
    "output gate after o_proj",
    "heads interleaved in kv_b_proj",
    # delta attention
    "softplus decay",
    "decay clamped instead of bounded",
    "A_log per channel",
    "dt_bias left out",
    "beta doubled",
    "unit length by mean",
    "unit length without epsilon",
    "keys not normalised",
    "no query scale",
    "convolution reversed",
    "convolution without SiLU",
    "state read before the write",
    "decay after the write",
    "state transposed",
    "o_norm per whole width",
    "output gate not squashed",
    # residuals
    "plain residuals",
    "mixture of normalised sources",
    "mixture scores scaled",
    "mixture norm weight left out",
    "block starts one layer late",
    "snapshot before the mixture",
    "no snapshot of the embedding",
    "mixture added back",
    "no final mixture",
    "first mixture of one source only",
    # feed-forward
    "gate sigmoid capped",
    "up not capped",
    "silu instead of SiTU",
    "biased routing weights",
    "unbiased choice",
    "routing weights not normalised",
    "softmax routing",
    "no routed norm",
    "routed norm per expert",
    "shared experts in the latent space only",
    "gate and up swapped",
)


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x / torch.sqrt((x * x).mean() + eps)
    return y if weight is None else y * weight


class Reference:
    """``logits(tokens)`` of one sequence, ``[seq, vocab]``; ``prefixes[i]`` collects the raw prefix after layer i.

    Args:
        settings: text settings with official names (``text_config`` of a config.json).
        tensors: the checkpoint, unquantised, by official names.
        slip: one of :data:`SLIPS`, or None.
    """

    def __init__(self, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], slip: str | None = None) -> None:
        if slip is not None and slip not in SLIPS:
            raise ValueError(slip)
        self.s = settings
        self.linear = settings["linear_attn_config"]
        self.tensors = {name.removeprefix("language_model."): t.double() for name, t in tensors.items()}
        self.slip = slip

    def logits(self, tokens: list[int]) -> Tensor:
        self.latents: dict[int, list[Tensor]] = {}
        self.inputs: dict[int, list[Tensor]] = {}
        self.states: dict[int, Tensor] = {}
        self.prefixes: dict[int, list[Tensor]] = {}
        return torch.stack([self.step(token) for token in tokens])

    def w(self, name: str) -> Tensor:
        return self.tensors[name]

    def step(self, token: int) -> Tensor:
        eps, block = self.s["rms_norm_eps"], self.s["attn_res_block_size"]
        prefix = self.w("model.embed_tokens.weight")[token]
        snapshots: list[Tensor] = []
        for i in range(self.s["num_hidden_layers"]):
            p = f"model.layers.{i}."
            starts = (i + 1 if self.slip == "block starts one layer late" else i) % block == 0
            if self.slip == "no snapshot of the embedding" and i == 0:
                starts = False
            if self.slip == "snapshot before the mixture" and starts and i > 0:
                snapshots.append(prefix)
            h = self.mix(snapshots, prefix, p + "self_attention_res") if snapshots else prefix
            if self.slip == "plain residuals":
                h, starts = prefix, False
            x = rms(h, self.w(p + "input_layernorm.weight"), eps)
            y = self.mla(i, x) if i + 1 in self.linear["full_attn_layers"] else self.kda(i, x)
            if starts:
                if not (self.slip == "snapshot before the mixture" and i > 0):
                    snapshots.append(prefix)
                prefix = y
            else:
                prefix = prefix + y
            if self.slip == "mixture added back":
                prefix = prefix + h
            h = prefix
            if snapshots and self.slip != "plain residuals":
                h = self.mix(snapshots, prefix, p + "mlp_res")
            x = rms(h, self.w(p + "post_attention_layernorm.weight"), eps)
            prefix = prefix + self.feed_forward(i, x)
            self.prefixes.setdefault(i, []).append(prefix)
        h = prefix
        if self.slip not in ("no final mixture", "plain residuals"):
            h = self.mix(snapshots, prefix, "model.output_attn_res")
        return self.w("lm_head.weight") @ rms(h, self.w("model.norm.weight"), eps)

    def mix(self, snapshots: list[Tensor], prefix: Tensor, name: str) -> Tensor:
        sources = snapshots + [prefix]
        if self.slip == "first mixture of one source only" and len(sources) == 2:
            return prefix
        direction = self.w(name + "_proj.weight")[0]
        if self.slip != "mixture norm weight left out":
            direction = direction * self.w(name + "_norm.weight")
        keys = [rms(v, None, 1e-5) for v in sources]
        scores = torch.stack([(k * direction).sum() for k in keys])
        if self.slip == "mixture scores scaled":
            scores = scores / math.sqrt(prefix.numel())
        values = keys if self.slip == "mixture of normalised sources" else sources
        return sum(a * v for a, v in zip(torch.softmax(scores, 0), values))

    def mla(self, i: int, x: Tensor) -> Tensor:
        s, a = self.s, f"model.layers.{i}.self_attn."
        heads, rank = s["num_attention_heads"], s["kv_lora_rank"]
        nope, rope, v_dim = s["qk_nope_head_dim"], s["qk_rope_head_dim"], s["v_head_dim"]
        eps = s["rms_norm_eps"] if self.slip == "latent norms use rms_norm_eps" else 1e-6
        q = rms(self.w(a + "q_a_proj.weight") @ x, self.w(a + "q_a_layernorm.weight"), eps)
        q = (self.w(a + "q_b_proj.weight") @ q).view(heads, nope + rope)
        kv = self.w(a + "kv_a_proj_with_mqa.weight") @ x
        latent, extra = rms(kv[:rank], self.w(a + "kv_a_layernorm.weight"), eps), kv[rank:]
        if self.slip == "extra key normed":
            extra = rms(extra, None, eps)
        if self.slip == "extra key left out":
            extra = torch.zeros_like(extra)
        self.latents.setdefault(i, []).append(torch.cat([latent, extra]))
        cache = torch.stack(self.latents[i])
        up = self.w(a + "kv_b_proj.weight")
        if self.slip == "heads interleaved in kv_b_proj":
            up = up.view(nope + v_dim, heads, rank).transpose(0, 1)
        up = up.reshape(heads, nope + v_dim, rank)
        scale = (nope if self.slip == "scale of the content dims only" else nope + rope) ** -0.5
        outs = []
        for head in range(heads):
            absorbed = torch.cat([q[head, :nope] @ up[head, :nope], q[head, nope:]])
            weights = torch.softmax(cache @ absorbed * scale, 0)
            outs.append(up[head, nope:] @ (weights @ cache[:, :rank]))
        out = torch.cat(outs)
        gate, o_proj = torch.sigmoid(self.w(a + "g_proj.weight") @ x), self.w(a + "o_proj.weight")
        if self.slip == "output gate after o_proj":
            return (o_proj @ out) * gate[: o_proj.shape[0]]
        return o_proj @ (out if self.slip == "no output gate in MLA" else out * gate)

    def kda(self, i: int, x: Tensor) -> Tensor:
        a, heads, dim = f"model.layers.{i}.self_attn.", self.linear["num_heads"], self.linear["head_dim"]
        width = self.linear["short_conv_kernel_size"]
        new = torch.stack([self.w(f"{a}{name}_proj.weight") @ x for name in "qkv"])
        history = self.inputs.setdefault(i, [torch.zeros_like(new)] * (width - 1))
        history.append(new)
        taps = torch.stack([self.w(f"{a}{name}_conv1d.weight")[:, 0] for name in "qkv"])
        if self.slip == "convolution reversed":
            taps = taps.flip(-1)
        mixed = sum(taps[..., j] * history[-width + j] for j in range(width))
        if self.slip != "convolution without SiLU":
            mixed = mixed * torch.sigmoid(mixed)
        q, k, v = mixed.view(3, heads, dim)

        def unit(t: Tensor) -> Tensor:
            if self.slip == "unit length by mean":
                return t / torch.sqrt((t * t).mean(-1, keepdim=True) + 1e-6)
            eps = 0.0 if self.slip == "unit length without epsilon" else 1e-6
            return t / torch.sqrt((t * t).sum(-1, keepdim=True) + eps)

        q = unit(q) * (1.0 if self.slip == "no query scale" else dim**-0.5)
        k = k if self.slip == "keys not normalised" else unit(k)

        raw = self.w(a + "f_b_proj.weight") @ (self.w(a + "f_a_proj.weight") @ x)
        if self.slip != "dt_bias left out":
            raw = raw + self.w(a + "dt_bias")
        a_log, bound = self.w(a + "A_log")[:heads, None], self.linear["gate_lower_bound"]
        if self.slip == "A_log per channel":
            a_log = self.w(a + "A_log").repeat(dim)[:dim][None, :]
        u = raw.view(heads, dim)
        g = bound * torch.sigmoid(torch.exp(a_log) * u)
        if self.slip == "softplus decay":
            g = -torch.exp(a_log) * torch.log1p(torch.exp(u))
        if self.slip == "decay clamped instead of bounded":
            g = (-torch.exp(a_log) * torch.log1p(torch.exp(u))).clamp_min(bound)
        beta = torch.sigmoid(self.w(a + "b_proj.weight") @ x) * (2.0 if self.slip == "beta doubled" else 1.0)

        state = self.states.get(i, torch.zeros(heads, dim, dim, dtype=torch.float64))
        new_state, outs = torch.empty_like(state), []
        for head in range(heads):
            decay = torch.diag(torch.exp(g[head]))
            before = state[head] if self.slip == "decay after the write" else decay @ state[head]
            error = beta[head] * (v[head] - before.T @ k[head])
            after = before + torch.outer(k[head], error)
            if self.slip == "decay after the write":
                after = decay @ after
            read = before if self.slip == "state read before the write" else after
            outs.append((read if self.slip == "state transposed" else read.T) @ q[head])
            new_state[head] = after
        self.states[i] = new_state

        z = (self.w(a + "g_proj.weight") @ x).view(heads, dim)
        norm, eps = self.w(a + "o_norm.weight"), self.s["rms_norm_eps"]
        if self.slip == "o_norm per whole width":
            normed = rms(torch.cat(outs), norm.repeat(heads), eps).view(heads, dim)
        else:
            normed = torch.stack([rms(o, norm, eps) for o in outs])
        gated = normed * (z if self.slip == "output gate not squashed" else torch.sigmoid(z))
        return self.w(a + "o_proj.weight") @ gated.flatten()

    def act(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.slip == "gate and up swapped":
            gate, up = up, gate
        if self.slip == "silu instead of SiTU":
            return gate * torch.sigmoid(gate) * up
        beta, cap = self.s["activation_situ_beta"] or 1.0, self.s["activation_situ_linear_beta"]
        capped_gate = beta * torch.tanh(gate / beta)
        capped_up = up if cap is None or self.slip == "up not capped" else cap * torch.tanh(up / cap)
        return capped_gate * torch.sigmoid(capped_gate if self.slip == "gate sigmoid capped" else gate) * capped_up

    def mlp(self, p: str, x: Tensor) -> Tensor:
        gate, up = self.w(p + "gate_proj.weight") @ x, self.w(p + "up_proj.weight") @ x
        return self.w(p + "down_proj.weight") @ self.act(gate, up)

    def choose(self, choice: Tensor) -> list[int]:
        groups, count = self.s["num_expert_group"], self.s["num_experts_per_token"]
        if groups > 1:
            per_group = choice.numel() // groups
            best = sorted(
                range(groups),
                key=lambda n: -sum(sorted(choice[n * per_group : (n + 1) * per_group].tolist())[-2:]),
            )[: self.s["topk_group"]]
            allowed = [e for e in range(choice.numel()) if e // per_group in best]
        else:
            allowed = list(range(choice.numel()))
        return sorted(allowed, key=lambda e: -choice[e].item())[:count]

    def feed_forward(self, i: int, x: Tensor) -> Tensor:
        if i < self.s["first_k_dense_replace"]:
            return self.mlp(f"model.layers.{i}.mlp.", x)
        m, eps = f"model.layers.{i}.block_sparse_moe.", self.s["rms_norm_eps"]
        logits = self.w(m + "gate.weight") @ x
        scores = torch.softmax(logits, 0) if self.slip == "softmax routing" else torch.sigmoid(logits)
        biased = scores + self.w(m + "gate.e_score_correction_bias")
        chosen = self.choose(scores if self.slip == "unbiased choice" else biased)
        weights = (biased if self.slip == "biased routing weights" else scores)[chosen]
        if self.s["moe_renormalize"] and self.slip != "routing weights not normalised":
            weights = weights / (weights.sum() + 1e-20)
        weights = weights * self.s["routed_scaling_factor"]

        t = self.w(m + "routed_expert_down_proj.weight") @ x
        norm = self.w(m + "routed_expert_norm.weight")
        routed = torch.zeros_like(t)
        for weight, expert in zip(weights, chosen):
            e = f"{m}experts.{expert}."
            y = self.w(e + "w2.weight") @ self.act(self.w(e + "w1.weight") @ t, self.w(e + "w3.weight") @ t)
            routed = routed + weight * (rms(y, norm, eps) if self.slip == "routed norm per expert" else y)
        if self.slip not in ("no routed norm", "routed norm per expert"):
            routed = rms(routed, norm, eps)
        shared = x
        if self.slip == "shared experts in the latent space only":
            shared = self.w(m + "routed_expert_down_proj.weight").T @ t
        return self.w(m + "routed_expert_up_proj.weight") @ routed + self.mlp(m + "shared_experts.", shared)
