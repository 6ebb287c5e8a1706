# SPDX-License-Identifier: Apache-2.0
"""Configuration of the Kimi-K3 text model, read from the multimodal config.json, its text part, or our own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from dcp_compile.errors import ConfigError

FULL_ATTENTION = "full_attention"
LINEAR_ATTENTION = "linear_attention"

# Settings that a nested config.json may carry outside its text part; the text part wins.
_SHARED_SETTINGS = (
    "dtype",
    "torch_dtype",
    "transformers_version",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
    "quantization_config",
)
# Settings that name somebody else's classes.
_FOREIGN_SETTINGS = ("model_type", "architectures", "auto_map")
_MXFP4_WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 32}
# What config.json says of a checkpoint with MXFP4 experts; everything else is stored as it is.
MXFP4_QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "mxfp4-pack-quantized",
            "weights": {
                **_MXFP4_WEIGHTS,
                "symmetric": True,
                "strategy": "group",
                "dynamic": False,
                "scale_dtype": "torch.uint8",
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*routed_expert_(down|up)_proj.*",
        "re:.*mlp\\.(gate|up|down)_proj.*",
        "re:.*res_proj.*",
        "re:.*lm_head.*",
    ],
    "kv_cache_scheme": None,
}


def text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flat text settings of ``config``, the content of a config.json with or without a nested ``text_config``."""
    settings = dict(config)
    if settings.get("text_config") is not None:
        outer = {key: settings[key] for key in _SHARED_SETTINGS if key in settings}
        settings = {**outer, **settings["text_config"]}
    return {key: value for key, value in settings.items() if key not in _FOREIGN_SETTINGS}


class KimiK3Config(PreTrainedConfig):
    """Kimi-K3 text model; the defaults are the values of the released model.

    ``KimiK3Config.from_dict`` and ``from_pretrained`` also take the multimodal config.json and use its text part.
    A ``quantization_config`` is checked and becomes ``expert_format="mxfp4"``: experts are stored in MXFP4, and since
    they are decoded when read, the model itself is not a quantised one.

    ``linear_attn_config`` holds ``num_heads``, ``head_dim``, ``short_conv_kernel_size``, ``gate_lower_bound``,
    ``use_full_rank_gate`` and the 1-based lists ``full_attn_layers`` and ``kda_layers``. Left out, it makes every
    fourth layer and the last one full attention, as in the released model.

    Raises:
        ConfigError: a setting is out of range, contradicts another, or asks for a variant this model does not have.
    """

    model_type = "kimi_k3"
    keys_to_ignore_at_inference = ["past_key_values", "cache", "taps"]

    vocab_size: int = 163840
    hidden_size: int = 7168
    num_hidden_layers: int = 93
    intermediate_size: int = 33792
    hidden_act: str = "situ"
    activation_situ_beta: float | None = 4.0
    activation_situ_linear_beta: float | None = 25.0
    rms_norm_eps: float = 1e-5
    attn_res_block_size: int = 12

    num_attention_heads: int = 96
    num_key_value_heads: int | None = None
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True
    linear_attn_config: dict | None = None

    num_experts: int = 896
    num_experts_per_token: int = 16
    num_shared_experts: int = 2
    moe_intermediate_size: int = 3072
    routed_expert_hidden_size: int = 3584
    latent_moe_use_norm: bool = True
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    num_expert_group: int = 1
    topk_group: int = 1
    topk_method: str = "noaux_tc"
    moe_router_activation_func: str = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0

    num_nextn_predict_layers: int = 0
    max_position_embeddings: int = 1048576
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 163584
    eos_token_id: int | list[int] | None = 163586
    pad_token_id: int | None = 163839
    expert_format: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if kwargs.get("text_config") is not None:
            raise ConfigError(
                "KimiK3Config takes text settings; read a config with a nested text_config by KimiK3Config.from_dict"
            )
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        self.linear_attn_config = {
            "num_heads": self.num_attention_heads,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            **_default_layer_lists(self.num_hidden_layers),
            **(self.linear_attn_config or {}),
        }
        quantization = kwargs.pop("quantization_config", None)
        if quantization is not None:
            check_quantization(quantization)
            self.expert_format = "mxfp4"
        self.check()
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return super().from_dict(text_settings(config_dict), **kwargs)

    def to_dict(self) -> dict[str, Any]:
        settings = super().to_dict()
        if settings.pop("expert_format", None) is not None:
            settings["quantization_config"] = copy.deepcopy(MXFP4_QUANTIZATION)
        return settings

    @property
    def layer_types(self) -> list[str]:
        """``"full_attention"`` (MLA) or ``"linear_attention"`` (KDA) per layer, from the 1-based lists."""
        full = set(self.linear_attn_config["full_attn_layers"])
        return [FULL_ATTENTION if i + 1 in full else LINEAR_ATTENTION for i in range(self.num_hidden_layers)]

    @property
    def linear_num_heads(self) -> int:
        return self.linear_attn_config["num_heads"]

    @property
    def linear_head_dim(self) -> int:
        return self.linear_attn_config["head_dim"]

    @property
    def linear_conv_kernel_dim(self) -> int:
        return self.linear_attn_config["short_conv_kernel_size"]

    @property
    def gate_lower_bound(self) -> float:
        return self.linear_attn_config["gate_lower_bound"]

    def check(self) -> None:
        """Raise :class:`ConfigError` unless the settings describe a Kimi-K3 text model."""
        self._check_variant()
        self._check_sizes()
        self._check_layer_lists()

    def _check_variant(self) -> None:
        linear = self.linear_attn_config
        expected = {
            "hidden_act": (self.hidden_act, "situ"),
            "mla_use_nope": (self.mla_use_nope, True),
            "mla_use_output_gate": (self.mla_use_output_gate, True),
            "linear_attn_config.use_full_rank_gate": (linear["use_full_rank_gate"], True),
            "latent_moe_use_norm": (self.latent_moe_use_norm, True),
            "topk_method": (self.topk_method, "noaux_tc"),
            "moe_router_activation_func": (self.moe_router_activation_func, "sigmoid"),
            "moe_layer_freq": (self.moe_layer_freq, 1),
            "num_nextn_predict_layers": (self.num_nextn_predict_layers, 0),
            "tie_word_embeddings": (self.tie_word_embeddings, False),
            "num_key_value_heads": (self.num_key_value_heads, self.num_attention_heads),
        }
        for name, (found, wanted) in expected.items():
            if found != wanted:
                raise ConfigError(f"{name}={found!r}: Kimi-K3 has {wanted!r}; other variants are not implemented")
        if self.expert_format not in (None, "mxfp4"):
            raise ConfigError(f"expert_format={self.expert_format!r} is unknown; use None or 'mxfp4'")
        bound = linear["gate_lower_bound"]
        if bound is None or not -5.0 <= bound < 0.0:
            raise ConfigError(
                f"linear_attn_config.gate_lower_bound={bound!r} is outside [-5, 0); set the decay bound there"
            )

    def _check_sizes(self) -> None:
        sizes = (
            "vocab_size hidden_size num_hidden_layers intermediate_size num_attention_heads q_lora_rank kv_lora_rank "
            "qk_nope_head_dim qk_rope_head_dim v_head_dim num_experts num_experts_per_token num_shared_experts "
            "moe_intermediate_size routed_expert_hidden_size num_expert_group topk_group attn_res_block_size "
            "linear_num_heads linear_head_dim linear_conv_kernel_dim"
        )
        for name in sizes.split():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r} is not a positive integer; set it to one")
        if not 0 <= self.first_k_dense_replace <= self.num_hidden_layers:
            raise ConfigError(
                f"first_k_dense_replace={self.first_k_dense_replace} is outside [0, {self.num_hidden_layers}], "
                "the number of layers; lower it"
            )
        if self.num_experts_per_token > self.num_experts:
            raise ConfigError(
                f"num_experts_per_token={self.num_experts_per_token} exceeds num_experts={self.num_experts}; lower it"
            )
        if self.num_experts % self.num_expert_group or self.topk_group > self.num_expert_group:
            raise ConfigError(
                f"num_experts={self.num_experts}, num_expert_group={self.num_expert_group}, "
                f"topk_group={self.topk_group}: the groups must divide the experts and topk_group must not exceed them"
            )
        per_group = self.num_experts // self.num_expert_group
        if self.num_expert_group > 1 and (per_group < 2 or self.topk_group * per_group < self.num_experts_per_token):
            raise ConfigError(
                f"{self.topk_group} groups of {per_group} experts cannot yield num_experts_per_token="
                f"{self.num_experts_per_token} (a group needs 2 experts at least); raise topk_group or use fewer groups"
            )

    def _check_layer_lists(self) -> None:
        full = list(self.linear_attn_config["full_attn_layers"])
        kda = list(self.linear_attn_config["kda_layers"])
        expected = list(range(1, self.num_hidden_layers + 1))
        if sorted(full + kda) != expected:
            raise ConfigError(
                f"linear_attn_config: full_attn_layers={full} and kda_layers={kda} must name each of the layers "
                f"1..{self.num_hidden_layers} (1-based) exactly once; correct the lists or num_hidden_layers"
            )


def check_quantization(quantization: Mapping[str, Any] | Any) -> None:
    """Raise :class:`ConfigError` unless ``quantization`` is the MXFP4 expert format of the released checkpoint."""
    settings = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    kind = (settings.get("quant_method"), settings.get("format"))
    if kind != ("compressed-tensors", "mxfp4-pack-quantized"):
        raise ConfigError(
            f"quantization_config: quant_method={kind[0]!r}, format={kind[1]!r}; only compressed-tensors with "
            "mxfp4-pack-quantized experts can be read; load an unquantised checkpoint instead"
        )
    for name, group in settings.get("config_groups", {}).items():
        weights = group.get("weights") or {}
        for key, wanted in _MXFP4_WEIGHTS.items():
            if weights.get(key) != wanted:
                raise ConfigError(
                    f"quantization_config.config_groups[{name!r}].weights.{key}={weights.get(key)!r}, "
                    f"MXFP4 has {wanted!r}; load an unquantised checkpoint instead"
                )


def _default_layer_lists(layers: int) -> dict[str, list[int]]:
    full = [i for i in range(1, layers + 1) if i % 4 == 0 or i == layers]
    return {"full_attn_layers": full, "kda_layers": [i for i in range(1, layers + 1) if i not in set(full)]}
