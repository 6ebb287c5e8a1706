# SPDX-License-Identifier: Apache-2.0
"""The DSpark draft with grouped-query attention: ``DSparkDraftModel`` checkpoints of model type "qwen3".

Same block, same heads as the latent-attention draft; the layers are those of Qwen3 and the cache holds full keys and
values, so under context parallelism every rank keeps a whole copy of it.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig, Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dcp_compile.errors import ConfigError

from .attention import eager_attention
from .backbone import DSparkBackbone
from .configuration import SIZES, check_layout, check_rope, check_sizes, check_taps, check_target, check_yarn_length
from .layers import DSparkLayer, DSparkRMSNorm, Tables
from .rope import DSparkRotaryEmbedding, rotate_halves

ARCHITECTURES = ("DSparkDraftModel", "Qwen3DSparkModel")

_INERT = {
    "attention_bias": False,
    "hidden_act": "silu",
    "markov_head_type": "vanilla",
    "rope_is_neox_style": True,
    "sample_from_anchor": True,
    "fc_norm": False,
    "aux_hidden_stream": "prefix",
    "logit_scale": 1.0,
    "transformer_layer_config": None,
    "use_sliding_window": False,
}


class DSparkDraftConfig(Qwen3Config):
    """A Qwen3 config plus the draft's settings.

    ``target_layer_ids``, ``mask_token_id`` and ``num_target_layers``, here the depth of the target, are read from the
    config itself or from its ``dflash_config`` and have no default. ``block_size`` and ``is_causal`` are as in
    ``K3DSparkConfig``.

    Raises ConfigError for values out of range and, by name, for layouts this model does not implement.
    """

    has_no_defaults_at_init = True

    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    num_target_layers: int | None = None
    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    block_size: int = 7
    is_causal: bool | None = None
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        nested = kwargs.get("dflash_config") or {}
        for key in ("target_layer_ids", "mask_token_id", "num_target_layers"):
            if getattr(self, key) is None:
                setattr(self, key, nested.get(key))
        if self.is_causal is None:
            self.is_causal = bool(nested.get("causal", False))
        self.draft_vocab_size = self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size
        self.target_hidden_size = self.hidden_size if self.target_hidden_size is None else self.target_hidden_size
        self.architectures = self.architectures or [ARCHITECTURES[0]]
        outer_theta = kwargs.get("rope_theta")
        check_yarn_length(self.rope_parameters, kwargs.get("rope_scaling"))
        super().__post_init__(**kwargs)
        for key in ("target_layer_ids", "mask_token_id", "num_target_layers"):
            if getattr(self, key) is None:
                raise ConfigError(f"{key} is missing from the draft config and from its dflash_config")
        if not set(self.architectures) <= set(ARCHITECTURES):
            raise ConfigError(f"architectures is {self.architectures}, expected one of {ARCHITECTURES}")
        check_sizes(self, (*SIZES, "head_dim", "num_target_layers"))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        check_layout(self, _INERT)
        check_taps(self.target_layer_ids, self.num_target_layers)
        check_rope(self.rope_parameters, outer_theta)

    def check_target(self, target: PreTrainedConfig) -> None:
        """Raise ConfigError unless ``target``, unwrapped if composite, is the model this draft was made for."""
        check_target(
            {
                "vocab_size": self.vocab_size,
                "hidden_size": self.target_hidden_size,
                "num_hidden_layers": self.num_target_layers,
            },
            target,
        )


class DSparkGQAttention(nn.Module):
    """Grouped-query attention with normed heads, whose cache entry is the rotated key and the value of every group."""

    def __init__(self, config: DSparkDraftConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = config.is_causal
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        width, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(width, heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, groups * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, groups * config.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * config.head_dim, width, bias=False)
        self.q_norm = DSparkRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = DSparkRMSNorm(config.head_dim, config.rms_norm_eps)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim))

    def cache_entry(self, x: torch.Tensor, tables: Tables) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B, S, H] -> key [B, groups, S, D] after norm and rotation, value [B, groups, S, D]."""
        key = self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2)
        return rotate_halves(key, *tables), self._heads(self.v_proj(x)).transpose(1, 2)

    def forward(
        self, x: torch.Tensor, tables: Tables, attention_mask: torch.Tensor | None, cache: Cache | None
    ) -> torch.Tensor:
        query = rotate_halves(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2), *tables)
        key, value = self.cache_entry(x, tables)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        out, _ = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling)
        return self.o_proj(out.flatten(2))


class DSparkDraftModel(DSparkBackbone):
    """The grouped-query draft (config: ``DSparkDraftConfig``). How to step it: see ``DSparkBackbone``."""

    config: DSparkDraftConfig
    config_class = DSparkDraftConfig
    replicated_cache = True

    def __init__(self, config: DSparkDraftConfig):
        super().__init__(config)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, width, bias=False)
        self.hidden_norm = DSparkRMSNorm(width, eps)
        self.layers = nn.ModuleList(
            DSparkLayer(DSparkGQAttention(config, i), width, config.intermediate_size, eps)
            for i in range(config.num_hidden_layers)
        )
        self.norm = DSparkRMSNorm(width, eps)
        self.rotary_emb = DSparkRotaryEmbedding(config.head_dim, config.rope_parameters)
        self.add_heads()
        self.post_init()

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike, *args: Any, config: PreTrainedConfig | None = None, **kwargs: Any
    ) -> Any:
        """As of every model; a config that the Auto classes have read as Qwen3's becomes the draft's."""
        if type(config) is Qwen3Config:
            config = cls.config_class.from_dict(config.to_dict())
        return super().from_pretrained(path, *args, config=config, **kwargs)

    # The checkpoint's names for what the backbone calls:
    @property
    def context_proj(self) -> nn.Linear:
        return self.fc

    @property
    def context_norm(self) -> DSparkRMSNorm:
        return self.hidden_norm

    @property
    def final_norm(self) -> DSparkRMSNorm:
        return self.norm


class Qwen3DSparkModel(DSparkDraftModel):
    """The same model under the other name in ARCHITECTURES."""
