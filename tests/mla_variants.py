# SPDX-License-Identifier: Apache-2.0
"""Attention layers that differ from DeepSeek-V3's: some may be absorbed all the same, the others must be refused.

Each is a subclass whose instances are made by changing the class of a tiny model's layers: see :func:`vary`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from dcp_compile._compat import CACHE_NAME
from tests.tiny_models import tiny_deepseek_v3


def vary(
    kind: type[DeepseekV3Attention], layers: int = 1, dtype: torch.dtype = torch.float32, **settings: Any
) -> nn.Module:
    """A tiny dense DeepSeek-V3 with attention layers of class ``kind``."""
    model = tiny_deepseek_v3(layers, dtype=dtype, first_k_dense_replace=layers, **settings)
    generator = torch.Generator().manual_seed(layers)
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
        kind.prepare(layer.self_attn, generator)
    return model


class Variant(DeepseekV3Attention):
    def prepare(self, generator: torch.Generator) -> None:
        """Add what the variant needs to a layer that was made without it."""


# --- layers that can be absorbed -------------------------------------------------------------------------------------


class ExpandsBeforeCaching(Variant):
    """Caches expanded keys and values, joined with cat, and gates its output, as models of other hubs do."""

    def prepare(self, generator: torch.Generator) -> None:
        weight = self.kv_b_proj.weight
        self.gate = nn.Linear(self.hidden_size, self.num_heads * self.v_head_dim, bias=False)
        self.gate.weight = nn.Parameter(0.2 * torch.randn(self.gate.weight.shape, generator=generator).to(weight.dtype))

    def forward(self, hidden_states, position_embeddings, attention_mask, **kwargs):
        cache = kwargs.pop(CACHE_NAME, None)
        batch, seq = hidden_states.shape[:-1]
        query = self.q_proj(hidden_states).view(batch, seq, -1, self.qk_head_dim).transpose(1, 2)
        q_nope, q_rope = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(hidden_states).split(
            [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
        )
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).view(
            batch, seq, -1, self.qk_nope_head_dim + self.v_head_dim
        )
        k_nope, value = expanded.transpose(1, 2).split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        k_rope = k_rope.view(batch, 1, seq, self.qk_rope_head_dim)
        q_rope, k_rope = deepseek.apply_rotary_pos_emb(q_rope, k_rope, *position_embeddings)
        query = torch.cat([q_nope, q_rope], dim=-1)
        key = torch.cat([k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)], dim=-1)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = deepseek.ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, deepseek.eager_attention_forward
        )
        out, weights = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        out = out.reshape(batch, seq, -1) * torch.sigmoid(self.gate(hidden_states))
        return self.o_proj(out), weights


class SqueezesTheLatent(Variant):
    """Takes the head axis off what comes out of the cache, and puts it back."""

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        return super().expand_kv(kv_nope.squeeze(1).unsqueeze(1), k_rot.squeeze(1).unsqueeze(1))


class TransposesTheLatent(Variant):
    """Moves the token axis, which is of size one for a single head, before it expands."""

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        key_value = self.kv_b_proj(kv_nope.transpose(1, 2).squeeze(2))
        key_value = key_value.unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim)).permute(0, 2, 1, 3)
        k_nope, value = key_value.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        return torch.cat([k_nope, k_rot.expand(-1, k_nope.shape[1], -1, -1)], dim=-1), value


# --- layers that cannot ----------------------------------------------------------------------------------------------


class NormsKeys(Variant):
    """A norm of each head's key after the up-projection."""

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super().expand_kv(kv_nope, k_rot)
        return key * torch.rsqrt(key.pow(2).mean(-1, keepdim=True) + 1e-6), value


class FlipsKeyHeads(Variant):
    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super().expand_kv(kv_nope, k_rot)
        return key.flip(1), value


class SwapsKeyHalves(Variant):
    """Rope part first: only layout operators, in an order that absorption does not assume."""

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super().expand_kv(kv_nope, k_rot)
        nope = self.qk_nope_head_dim
        return torch.cat([key[..., nope:], key[..., :nope]], dim=-1), value


class SwapsValueHeads(Variant):
    """A permutation of the value heads by slices and cat."""

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super().expand_kv(kv_nope, k_rot)
        return key, torch.cat([value[:, 1:], value[:, :1]], dim=1)


class ScalesValues(Variant):
    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super().expand_kv(kv_nope, k_rot)
        return key, 2 * value


class ClampsKeys(Variant):
    """A function that is the identity on all but large numbers, which probes may not contain."""

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super().expand_kv(kv_nope, k_rot)
        return key.clamp(-1e4, 1e4), value


class ScalesTheCachedLatent(Variant):
    """Not the latent that is in the cache."""

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        return super().expand_kv(3 * kv_nope, k_rot)


class ScalesTheCachedRope(Variant):
    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        return super().expand_kv(kv_nope, -k_rot)


class QuantisedUpProjection(Variant):
    """The weight is dequantised in the graph."""

    def prepare(self, generator: torch.Generator) -> None:
        class Quantised(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return F.linear(x, (self.weight * 8).round() / 8)

        self.kv_b_proj.__class__ = Quantised


class BiasedUpProjection(Variant):
    def prepare(self, generator: torch.Generator) -> None:
        weight = self.kv_b_proj.weight
        self.kv_b_proj.bias = nn.Parameter(torch.randn(len(weight), generator=generator).to(weight.dtype))


class TwoUpProjections(Variant):
    """Values of the sum of two projections."""

    def prepare(self, generator: torch.Generator) -> None:
        self.second = nn.Linear(self.kv_lora_rank, self.num_heads * self.v_head_dim, bias=False).to(
            self.kv_b_proj.weight.dtype
        )

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super().expand_kv(kv_nope, k_rot)
        more = self.second(kv_nope).squeeze(1).unflatten(-1, (-1, self.v_head_dim)).transpose(1, 2)
        half = self.v_head_dim // 2
        return key, torch.cat([value[..., :half], more[..., half:]], dim=-1)


class SkipsTheCache(Variant):
    def forward(self, *args, **kwargs):
        kwargs[CACHE_NAME] = None
        return super().forward(*args, **kwargs)


class IgnoresTheCache(Variant):
    """Updates the cache but attends to the new tokens only."""

    def forward(self, *args, **kwargs):
        class Deaf:
            def update(inner, first, second, *rest, **options):
                kwargs[CACHE_NAME].update(first, second, *rest, **options)
                return first, second

        return super().forward(*args, **{**kwargs, CACHE_NAME: Deaf()})


class SlidingWindow(Variant):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs, sliding_window=8)


class SoftCap(Variant):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs, softcap=30.0)
