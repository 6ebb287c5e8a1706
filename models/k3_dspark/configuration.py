# SPDX-License-Identifier: Apache-2.0
"""Configuration of the K3 DSpark draft (multi-head latent attention, one bidirectional block per step)."""

from typing import Any

from transformers import PreTrainedConfig

from dcp_compile.errors import ConfigError

PUBLISHED_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 32768,
    "rope_theta": 50000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_YARN_KEYS = {*PUBLISHED_ROPE, "attention_factor"}

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "target_hidden_size",
    "block_size",
    "markov_rank",
)
_MLA_SIZES = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "target_num_hidden_layers",
)

# Switches of sibling layouts, with the value under which they change nothing.
_INERT = {
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "mla_use_qk_norm": False,
    "dspark_bonus_anchor": False,
    "sample_from_anchor": True,
    "fc_norm": False,
    "aux_hidden_stream": "prefix",
    "hidden_act": "silu",
    "markov_head_type": "vanilla",
    "attention_bias": False,
    "logit_scale": 1.0,
    "n_routed_experts": 0,
    "n_shared_experts": 0,
    "transformer_layer_config": None,
}


class K3DSparkConfig(PreTrainedConfig):
    """Every key left out takes the value of the published Kimi-K3 DSpark checkpoint.

    ``target_layer_ids`` are the 0-based target layers whose outputs are tapped, ``num_target_layers`` is their number,
    and ``target_num_hidden_layers`` the depth of the target. ``block_size`` is the number of draft tokens the block was
    trained for (``dspark_block_size`` is read as well). ``is_causal`` is taken from the key itself, else from
    ``dflash_config["causal"]``, else False.

    Raises ConfigError for values out of range and, by name, for sibling layouts this model does not implement.
    """

    model_type = "k3_dspark"
    default_theta = 50000.0

    vocab_size: int = 163840
    draft_vocab_size: int | None = None
    hidden_size: int = 7168
    intermediate_size: int = 14336
    num_hidden_layers: int = 5
    num_attention_heads: int = 64
    num_key_value_heads: int | None = None
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 1048576
    rope_parameters: dict | None = None
    target_hidden_size: int | None = None
    target_num_hidden_layers: int = 93
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    mask_token_id: int = 163837
    block_size: int | None = None
    is_causal: bool | None = None
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    initializer_range: float = 0.02
    bos_token_id: int | None = 163584
    eos_token_id: int | list[int] | None = 163586
    pad_token_id: int | None = 163839
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.rope_parameters is None:
            self.rope_parameters = dict(PUBLISHED_ROPE)
        if self.target_layer_ids is None:
            self.target_layer_ids = [2, 23, 47, 71, 89]
        self.draft_vocab_size = self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size
        self.num_key_value_heads = (
            self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads
        )
        self.target_hidden_size = self.hidden_size if self.target_hidden_size is None else self.target_hidden_size
        self.num_target_layers = (
            len(self.target_layer_ids) if self.num_target_layers is None else self.num_target_layers
        )
        spelled_otherwise = kwargs.pop("dspark_block_size", 7)
        self.block_size = spelled_otherwise if self.block_size is None else self.block_size
        if self.is_causal is None:
            self.is_causal = bool((kwargs.get("dflash_config") or {}).get("causal", False))
        self.architectures = self.architectures or ["K3DSparkModel"]
        outer_theta = kwargs.get("rope_theta")
        check_yarn_length(self.rope_parameters, kwargs.get("rope_scaling"))
        super().__post_init__(**kwargs)
        _check(self, outer_theta)

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head: nope plus rope dimensions."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        found = config_dict.get("model_type", cls.model_type)
        if found != cls.model_type:
            raise ConfigError(
                f"model_type is {found!r} (architectures {config_dict.get('architectures')}) but K3DSparkConfig reads "
                f"{cls.model_type!r}; load_draft picks the model that fits a checkpoint"
            )
        return super().from_dict(config_dict, **kwargs)

    def check_target(self, target: PreTrainedConfig) -> None:
        """Raise ConfigError unless ``target``, unwrapped if composite, is the model this draft was made for."""
        check_target(
            {
                "vocab_size": self.vocab_size,
                "hidden_size": self.target_hidden_size,
                "num_hidden_layers": self.target_num_hidden_layers,
            },
            target,
        )


def check_target(expected: dict[str, int], target: PreTrainedConfig) -> None:
    """Raise ConfigError unless the target's config has the expected values."""
    for key, value in expected.items():
        found = getattr(target.get_text_config(), key)
        if found != value:
            raise ConfigError(
                f"the draft was made for a target with {key}={value}, this one has {found}; "
                "use the draft that was trained for this target"
            )


def _check(config: K3DSparkConfig, outer_theta: float | None) -> None:
    """Raise ConfigError for the first setting that is out of range or belongs to another layout."""
    if config.architectures != ["K3DSparkModel"]:
        raise ConfigError(
            f"architectures is {config.architectures}, expected ['K3DSparkModel']: this is another network"
        )
    check_layout(config, _INERT)
    if config.q_lora_rank is None:
        raise ConfigError("q_lora_rank is None: a draft without a query down-projection is another layout")
    check_sizes(config, (*SIZES, *_MLA_SIZES))
    if config.qk_rope_head_dim % 2:
        raise ConfigError(f"qk_rope_head_dim={config.qk_rope_head_dim} must be even: RoPE rotates pairs")
    if config.num_key_value_heads != config.num_attention_heads:
        raise ConfigError(
            f"num_key_value_heads={config.num_key_value_heads} differs from num_attention_heads="
            f"{config.num_attention_heads}: grouped-query drafts are another network"
        )
    if config.num_target_layers != len(config.target_layer_ids):
        raise ConfigError(
            f"num_target_layers={config.num_target_layers} must be the number of target_layer_ids, "
            f"{len(config.target_layer_ids)} (the depth of the target is target_num_hidden_layers)"
        )
    check_taps(config.target_layer_ids, config.target_num_hidden_layers)
    check_rope(config.rope_parameters, outer_theta)


def check_sizes(config: PreTrainedConfig, keys: tuple[str, ...]) -> None:
    """Raise ConfigError for the first of the settings that is not a positive integer."""
    for key in keys:
        value = getattr(config, key)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{key}={value!r} must be an integer of at least 1")


def check_layout(config: PreTrainedConfig, inert: dict[str, Any]) -> None:
    """Raise ConfigError for a switch that is set to another layout, and for the settings all drafts share."""
    for key, value in inert.items():
        found = getattr(config, key, value)
        if found != value:
            raise ConfigError(
                f"{key}={found!r} selects a draft layout this model does not implement; it needs {value!r}"
            )
    if config.draft_vocab_size != config.vocab_size:
        raise ConfigError(
            f"draft_vocab_size={config.draft_vocab_size} differs from vocab_size={config.vocab_size}: "
            "drafts over a reduced vocabulary are not supported"
        )
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise ConfigError(f"mask_token_id={config.mask_token_id} is outside [0, vocab_size={config.vocab_size})")
    if config.tie_word_embeddings:
        raise ConfigError("tie_word_embeddings=True: the draft has no output head of its own to tie")
    nested = getattr(config, "dflash_config", None) or {}
    for key in ("target_layer_ids", "mask_token_id"):
        if key in nested and nested[key] != getattr(config, key):
            raise ConfigError(f"dflash_config has {key}={nested[key]} but the config itself has {getattr(config, key)}")
    sliding = [kind for kind in getattr(config, "layer_types", None) or [] if kind != "full_attention"]
    if sliding:
        raise ConfigError(f"layer_types contains {sliding[0]!r}; every layer of this draft is full_attention")


def check_taps(taps: list[int], depth: int) -> None:
    """Raise ConfigError unless the taps are distinct ascending layers of a target with ``depth`` layers."""
    if not taps or any(not isinstance(tap, int) for tap in taps) or taps != sorted(set(taps)):
        raise ConfigError(f"target_layer_ids={taps} must be distinct layer numbers in ascending order")
    if taps[0] < 0 or taps[-1] >= depth:
        raise ConfigError(f"target_layer_ids={taps} must lie within the {depth} layers of the target, from 0 on")


def check_yarn_length(*ropes: dict | None) -> None:
    """Raise ConfigError if YaRN is asked for without the length it scales: transformers would take the scaled one."""
    for rope in ropes:
        kind = rope and (rope.get("rope_type") or rope.get("type"))
        if kind == "yarn" and rope.get("original_max_position_embeddings") is None:
            raise ConfigError("YaRN without original_max_position_embeddings: give the length before scaling")


def check_rope(rope: dict, outer_theta: float | None) -> None:
    """Raise ConfigError unless ``rope`` is plain or YaRN with known keys; outer_theta is a rope_theta beside it."""
    kind = rope.get("rope_type")
    allowed = {"default": {"rope_type", "rope_theta"}, "yarn": _YARN_KEYS}
    if kind not in allowed:
        raise ConfigError(f"rope_type={kind!r} is not supported; use one of {sorted(allowed)}")
    unknown = set(rope) - allowed[kind] - {"type"}
    if unknown:
        raise ConfigError(f"rope_parameters of type {kind!r} has unknown keys {sorted(unknown)}")
    if not _is_number(rope.get("rope_theta")):
        raise ConfigError(f"rope_parameters['rope_theta']={rope.get('rope_theta')!r} must be a number")
    if outer_theta is not None and outer_theta != rope["rope_theta"]:
        raise ConfigError(f"rope_theta={outer_theta} contradicts rope_parameters['rope_theta']={rope['rope_theta']}")
    if kind == "yarn":
        if not _is_number(rope.get("factor")) or rope["factor"] < 1:
            raise ConfigError(f"rope_parameters['factor']={rope.get('factor')!r} must be a number of at least 1")
        if rope.get("attention_factor") not in (None, 1.0):
            raise ConfigError(
                f"rope_parameters['attention_factor']={rope['attention_factor']}; only 1.0 has a known meaning"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
