# SPDX-License-Identifier: Apache-2.0
"""The Kimi-K3 text model: decoder layers with block attention residuals over MLA and KDA, and the model head."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from dcp_compile._compat import CACHE_NAME, attention_masks, capture_outputs
from dcp_compile.errors import CheckpointError
from dcp_compile.parallel.loading import ShardedLoading, checked_files, shard_loading

from .attention import KimiK3Attention
from .configuration import FULL_ATTENTION, KimiK3Config
from .delta_attention import KimiK3DeltaAttention, ShortConvolution
from .layers import KimiK3MLP, KimiK3RMSNorm
from .moe import KimiK3Experts, KimiK3Router, KimiK3SparseMoeBlock
from .parallel_plan import SHARDING_PLAN
from .residual import MixQuery, Residual, mix, restart
from .weights import official_state_dict, plan_loading

# Decay per token that fresh KDA channels start with, spread evenly in the logarithm: memories of 1 to 1000 tokens.
INITIAL_DECAY = (1e-3, 1.0)


@dataclass
class KimiK3ModelOutput(BaseModelOutputWithPast):
    """``taps [batch, seq, len(tap_layers) * hidden]``: see :meth:`KimiK3Model.forward`."""

    taps: Tensor | None = None


@dataclass
class KimiK3CausalLMOutput(CausalLMOutputWithPast):
    """``taps [batch, seq, len(tap_layers) * hidden]``: see :meth:`KimiK3Model.forward`."""

    taps: Tensor | None = None


class KimiK3DecoderLayer(GradientCheckpointingLayer):
    """One layer: mixture -> norm -> attention, mixture -> norm -> feed-forward, both added to the running prefix."""

    def __init__(self, config: KimiK3Config, layer_idx: int) -> None:
        super().__init__()
        self.is_full_attention = config.layer_types[layer_idx] == FULL_ATTENTION
        self.starts_block = layer_idx % config.attn_res_block_size == 0
        attention = KimiK3Attention if self.is_full_attention else KimiK3DeltaAttention
        self.self_attn = attention(config, layer_idx)
        if layer_idx < config.first_k_dense_replace:
            self.mlp = KimiK3MLP(config, config.intermediate_size)
        else:
            self.block_sparse_moe = KimiK3SparseMoeBlock(config)
        self.input_layernorm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attention_res_norm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attention_res_proj = MixQuery(config.hidden_size)
        self.mlp_res_norm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp_res_proj = MixQuery(config.hidden_size)

    def forward(
        self,
        prefix: Tensor,
        snapshots: Tensor | None,
        scales: Tensor | None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take and return the fields of a :class:`Residual`; ``attention_mask`` is that of this layer's attention."""
        residual = Residual(prefix, snapshots, scales)
        x = self.input_layernorm(mix(residual, self.self_attention_res_norm, self.self_attention_res_proj))
        if self.is_full_attention:
            y, _ = self.self_attn(x, attention_mask, cache, **kwargs)
        else:
            y = self.self_attn(x, attention_mask, cache)
        residual = restart(residual, y) if self.starts_block else residual._replace(prefix=residual.prefix + y)

        x = self.post_attention_layernorm(mix(residual, self.mlp_res_norm, self.mlp_res_proj))
        y = self.mlp(x) if hasattr(self, "mlp") else self.block_sparse_moe(x)
        return residual.prefix + y, residual.snapshots, residual.scales


class KimiK3PreTrainedModel(ShardedLoading, PreTrainedModel):
    """What both model classes share: loading rules and the initialisation for training from scratch."""

    config_class = KimiK3Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["KimiK3DecoderLayer"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _is_stateful = True
    _can_record_outputs = {"hidden_states": KimiK3DecoderLayer, "attentions": KimiK3Attention}
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias", "conv1d", "o_norm", "e_score_correction_bias"]
    sharding_plan = SHARDING_PLAN
    # transformers looks for these two in the source of this very file; attention and experts have files of their own.
    _can_set_attn_implementation_cached_value = True
    _can_set_experts_implementation_cached_value = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, MixQuery):
            init.zeros_(module.weight)  # every mixture starts as the mean of its sources
        elif isinstance(module, ShortConvolution):
            bound = module.weight.shape[-1] ** -0.5
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, KimiK3DeltaAttention):
            init.zeros_(module.A_log)
            low, high = (torch.tensor(rate).log().item() for rate in INITIAL_DECAY)
            share = torch.empty_like(module.dt_bias).uniform_(low, high).exp() / -module.gate_lower_bound
            init.copy_(module.dt_bias, torch.logit(share))
        elif isinstance(module, KimiK3Experts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, KimiK3Router):
            init.normal_(module.weight, mean=0.0, std=std)
            init.zeros_(module.e_score_correction_bias)

    @property
    def _checkpoint_root(self) -> str:
        """Path of this model inside the language model of a checkpoint."""
        return "" if hasattr(self, self.base_model_prefix) else f"{self.base_model_prefix}."

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys=None):
        """The step of ``from_pretrained`` that reads tensors (transformers 5.17 and 5.24): here they get our names."""
        if "disk" in (load_config.device_map or {}).values():
            raise CheckpointError("device_map sends layers to disk, where fused experts cannot go; use cpu for them")
        files = checked_files(model, state_dict, checkpoint_files, load_config)
        loading = shard_loading()
        with ExitStack() as stack:
            entries = dict(state_dict or {})
            if loading is not None:
                entries.update(loading.open(files))
            else:
                for file in files:
                    opened = stack.enter_context(safe_open(file, framework="pt"))
                    entries.update((name, opened.get_slice(name)) for name in opened.keys())
            root = model._checkpoint_root
            plan = plan_loading(model.state_dict(), entries, root, ignored=("lm_head.",) if root else ())
            if loading is not None:
                plan = loading.own_parts(model, plan)
            return PreTrainedModel._load_pretrained_model(model, plan, None, load_config, expected_keys)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        expert_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Save under the official tensor names; ``expert_format="mxfp4"`` quantises the experts, None keeps them.

        Other arguments as in transformers. ``state_dict`` has the names of this model.

        Raises:
            CheckpointError: an unknown format, or experts that MXFP4 cannot hold.
        """
        parameters = self.state_dict() if state_dict is None else state_dict
        official = official_state_dict(parameters, self._checkpoint_root, expert_format)
        before, self.config.expert_format = self.config.expert_format, expert_format  # of the file, not of the model
        try:
            super().save_pretrained(
                save_directory, is_main_process, state_dict=official, save_original_format=False, **kwargs
            )
        finally:
            self.config.expert_format = before


class KimiK3Model(KimiK3PreTrainedModel):
    """Embedding, decoder layers, final mixture and norm. Positions never enter: there is no rotary embedding."""

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__(config)
        config.check()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([KimiK3DecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.output_attn_res_norm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.output_attn_res_proj = MixQuery(config.hidden_size)
        self.norm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        tap_layers: tuple[int, ...] | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> KimiK3ModelOutput:
        """Hidden states ``[batch, seq, hidden]`` of tokens ``[batch, seq]`` that follow those in the cache.

        Args:
            attention_mask: ``[batch, past + seq]``, 0 at left padding.
            position_ids: accepted for generate(), not used.
            cache, past_key_values: the same thing under its new and its old name.
            use_cache: make a cache if none is given; by default as the config says, but not in training.
            tap_layers: 0-based layers whose raw running prefix (the AttnRes prefix right after the layer, no norm) is
                returned, concatenated in this order, as ``taps``.

        Raises:
            ValueError: not exactly one of ``input_ids`` and ``inputs_embeds``, two caches, a cache made without the
                config, a tap layer that is not there, or a cache together with gradient checkpointing.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if cache is not None and past_key_values is not None and cache is not past_key_values:
            raise ValueError("cache and past_key_values are two names of one argument; give one of them")
        for layer in tap_layers or ():
            if not 0 <= layer < self.config.num_hidden_layers:
                raise ValueError(
                    f"tap_layers={tuple(tap_layers)}: there is no layer {layer}, layers are 0-based and end at "
                    f"{self.config.num_hidden_layers - 1}"
                )
        cache = past_key_values if cache is None else cache
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if cache is not None and len(cache.layers) < len(self.layers):
            raise ValueError(
                f"the cache has {len(cache.layers)} layers, the model {len(self.layers)}; make it with "
                "DynamicCache(config=model.config), which tells MLA and KDA layers apart"
            )
        if cache is not None and self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            raise ValueError("gradient checkpointing would update the cache twice; pass use_cache=False and no cache")

        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        causal_mask, padding_mask = attention_masks(self.config, hidden_states, attention_mask, cache)

        residual = Residual(hidden_states)
        taps: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            mask = causal_mask if layer.is_full_attention else padding_mask
            residual = Residual(*layer(*residual, attention_mask=mask, cache=cache, **kwargs))
            if tap_layers and i in tap_layers:
                taps[i] = residual.prefix
        hidden_states = self.norm(mix(residual, self.output_attn_res_norm, self.output_attn_res_proj))
        return KimiK3ModelOutput(
            last_hidden_state=hidden_states,
            taps=torch.cat([taps[i] for i in tap_layers], dim=-1) if tap_layers else None,
            **{CACHE_NAME: cache},
        )


class KimiK3ForCausalLM(KimiK3PreTrainedModel, GenerationMixin):
    """Kimi-K3 text model with its (untied) language-model head."""

    _tied_weights_keys = {}

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__(config)
        self.model = KimiK3Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        tap_layers: tuple[int, ...] | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> KimiK3CausalLMOutput:
        """Logits ``[batch, kept, vocab]``; other arguments and ``taps`` as in :meth:`KimiK3Model.forward`.

        Args:
            labels: ``[batch, seq]``, shifted inside, -100 where there is none; adds ``loss``.
            logits_to_keep: number of last positions to compute logits for, 0 for all, or their indices ``[kept]``.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            tap_layers=tap_layers,
            cache=cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)
        return KimiK3CausalLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            taps=outputs.taps,
            **{CACHE_NAME: outputs[CACHE_NAME] if CACHE_NAME in outputs else None},
        )
