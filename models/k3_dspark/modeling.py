# SPDX-License-Identifier: Apache-2.0
"""The K3 DSpark draft: a few latent-attention layers over projected target states, and a block of mask tokens.

The draft keeps no embedding and no output head of its own: both are the target's. Its cache holds, per layer and
position, the normed latent and the rotated shared key of the *projected target state* of that position; the rows of the
current block follow them as scratch.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dcp_compile.errors import ConfigError

from .attention import block_mask, eager_attention
from .weights import StrictLoading
from .configuration import K3DSparkConfig
from .drafting import DSparkDrafting
from .heads import ConfidenceHead, MarkovHead
from .rope import K3DSparkRotaryEmbedding, rotate_pairs, softmax_scale

Tables = tuple[torch.Tensor, torch.Tensor]


class K3DSparkRMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class K3DSparkMLP(nn.Module):
    def __init__(self, config: K3DSparkConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class K3DSparkAttention(nn.Module):
    """Multi-head latent attention whose cache entry is the normed latent and the rotated shared key."""

    def __init__(self, config: K3DSparkConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = config.is_causal
        self.scaling = softmax_scale(config.qk_head_dim, config.rope_parameters)
        heads = config.num_attention_heads
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = K3DSparkRMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = K3DSparkRMSNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * config.v_head_dim, config.hidden_size, bias=False)

    def latent_kv(self, x: torch.Tensor, tables: Tables) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B, S, H] -> latent [B, 1, S, R] after its norm, shared key [B, 1, S, Dr] after rotation."""
        compressed = self.kv_a_proj_with_mqa(x).unsqueeze(1)
        latent, k_rope = compressed.split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        return self.kv_a_layernorm(latent), rotate_pairs(k_rope, *tables)

    def expand_kv(self, latent: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """latent [B, 1, T, R], k_rope [B, 1, T, Dr] -> key [B, heads, T, Dn + Dr], value [B, heads, T, Dv]."""
        nope, v_dim = self.config.qk_nope_head_dim, self.config.v_head_dim
        expanded = self.kv_b_proj(latent.squeeze(1)).unflatten(-1, (-1, nope + v_dim)).transpose(1, 2)
        k_nope, value = expanded.split([nope, v_dim], dim=-1)
        return torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)), dim=-1), value

    def forward(
        self, x: torch.Tensor, tables: Tables, attention_mask: torch.Tensor | None, cache: Cache | None
    ) -> torch.Tensor:
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query = query.unflatten(-1, (-1, self.config.qk_head_dim)).transpose(1, 2)
        q_nope, q_rope = query.split([self.config.qk_nope_head_dim, self.config.qk_rope_head_dim], dim=-1)
        query = torch.cat((q_nope, rotate_pairs(q_rope, *tables)), dim=-1)

        latent, k_rope = self.latent_kv(x, tables)
        if cache is not None:
            latent, k_rope = cache.update(latent, k_rope, self.layer_idx)
        key, value = self.expand_kv(latent, k_rope)

        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        out, _ = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling)
        return self.o_proj(out.flatten(2))


class K3DSparkLayer(nn.Module):
    def __init__(self, config: K3DSparkConfig, layer_idx: int):
        super().__init__()
        self.input_layernorm = K3DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = K3DSparkAttention(config, layer_idx)
        self.post_attention_layernorm = K3DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = K3DSparkMLP(config)

    def forward(
        self, x: torch.Tensor, tables: Tables, attention_mask: torch.Tensor | None, cache: Cache | None
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), tables, attention_mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class K3DSparkPreTrainedModel(StrictLoading, PreTrainedModel):
    config: K3DSparkConfig
    config_class = K3DSparkConfig
    _no_split_modules = ["K3DSparkLayer"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _keys_to_ignore_on_load_unexpected = [r"^embed_tokens\.", r"^lm_head\.", r"rotary_emb\.inv_freq$"]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, K3DSparkRotaryEmbedding):
            # Loading builds the model without storage and then fills whatever the checkpoint does not hold.
            module.inv_freq = module.frequencies(module.inv_freq.device)


class K3DSparkModel(DSparkDrafting, K3DSparkPreTrainedModel):
    """The draft of a Kimi-K3 target (config: `K3DSparkConfig`).

    Positions are token positions; position s of the cache holds the target state of the token *at* s. A step for an
    anchor (the newest token) at position n needs the context of positions 0..n-1 in the cache:

        c = model.project_context(taps);  model.ingest(c, position_ids, cache)
        hidden = model(inputs_embeds=embed(model.block_ids(anchor, K)), position_ids=n + arange(K), cache=cache)

    Row j of the block predicts position n + j + 1. `draft_block` does the step and the sampling.
    """

    def __init__(self, config: K3DSparkConfig):
        super().__init__(config)
        width = config.hidden_size
        # The target's embedding, once shared by set_input_embeddings; checkpoints carry a frozen copy, which is skipped.
        self.register_module("embed_tokens", None)
        self.context_proj = nn.Linear(config.num_target_layers * config.target_hidden_size, width, bias=False)
        self.context_norm = K3DSparkRMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(K3DSparkLayer(config, i) for i in range(config.num_hidden_layers))
        self.final_norm = K3DSparkRMSNorm(width, config.rms_norm_eps)
        self.markov_head = MarkovHead(config.vocab_size, config.markov_rank)
        self.confidence_head = None
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(width + config.markov_rank * config.confidence_head_with_markov)
        else:
            self._keys_to_ignore_on_load_unexpected = [*self._keys_to_ignore_on_load_unexpected, r"^confidence_head\."]
        self.rotary_emb = K3DSparkRotaryEmbedding(config.qk_rope_head_dim, config.rope_parameters)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module | None:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module | None) -> None:
        """Share the target's embedding, so that forward accepts `input_ids`."""
        self.embed_tokens = value

    def project_context(self, taps: torch.Tensor) -> torch.Tensor:
        """Concatenated raw outputs of the tapped target layers [B, S, taps * target H] -> context states [B, S, H]."""
        return self.context_norm(self.context_proj(taps))

    def context_kv(self, context: torch.Tensor, position_ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Context states [B, S, H] at positions [B, S] -> the cache entries (latent, shared key) of every layer.

        The states enter each layer's key/value projection as they are: no input layernorm, no attention, no MLP.
        """
        tables = self.rotary_emb(position_ids)
        return [layer.self_attn.latent_kv(context, tables) for layer in self.layers]

    def ingest(self, context: torch.Tensor, position_ids: torch.Tensor, cache: Cache) -> None:
        """Append the context states [B, S, H] of positions [B, S] to the cache of every layer."""
        for layer_idx, (latent, k_rope) in enumerate(self.context_kv(context, position_ids)):
            cache.update(latent, k_rope, layer_idx)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Block rows at positions [B, K] -> final hidden states [B, K, H], ready for the target's output head.

        Every row sees the whole cache and all rows of the block (only the earlier ones if config.is_causal). The rows
        are appended to the cache as scratch: crop them, or overwrite them once their tokens are accepted. Rows come
        as target embeddings [B, K, H], or as ids [B, K] if the target's embedding is shared. attention_mask is
        [B, cached + K] with false for left padding, or a ready additive mask [B, 1, K, cached + K].
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ConfigError("give exactly one of input_ids and inputs_embeds")
        if position_ids is None:
            raise ConfigError("position_ids is missing: a block needs the token positions of its rows, [B, K]")
        if inputs_embeds is None:
            if self.embed_tokens is None:
                raise ConfigError("input_ids need the target's embedding: set_input_embeddings(target.get_input_embeddings())")
            inputs_embeds = self.embed_tokens(input_ids)
        if attention_mask is None or attention_mask.dim() == 2:
            cached = 0 if cache is None else cache.get_seq_length()
            rows, dtype = inputs_embeds.shape[1], inputs_embeds.dtype
            attention_mask = block_mask(attention_mask, rows, cached, self.config.is_causal, dtype, inputs_embeds.device)
        tables = self.rotary_emb(position_ids)
        x = inputs_embeds
        for layer in self.layers:
            x = layer(x, tables, attention_mask, cache)
        return self.final_norm(x)
