# SPDX-License-Identifier: Apache-2.0
import copy
import importlib
import json

import pytest
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

import dcp_compile.models.kimi_k3
from dcp_compile.errors import ConfigError
from dcp_compile.models import KimiK3Config, KimiK3ForCausalLM, KimiK3Model
from tests.models.kimi_k3.official import quantization_config, released_config
from tests.tiny_models import tiny_kimi_k3_config


def write(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def check_released(config):
    assert type(config) is KimiK3Config
    mla = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert mla == [*range(3, 92, 4), 92]
    assert len(config.layer_types) == 93 and set(config.layer_types) == {"full_attention", "linear_attention"}
    assert (config.hidden_size, config.num_experts, config.attn_res_block_size) == (7168, 896, 12)
    assert (config.linear_num_heads, config.linear_head_dim, config.gate_lower_bound) == (96, 128, -5.0)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (163584, 163586, 163839)


def test_full_config_gives_our_text_config(tmp_path):
    config = AutoConfig.from_pretrained(write(tmp_path, released_config()))
    check_released(config)
    assert config.expert_format == "mxfp4"
    assert str(config.dtype) == "torch.bfloat16"
    assert not hasattr(config, "quantization_config")  # transformers would look for a quantiser
    assert not hasattr(config, "auto_map") and not hasattr(config, "vision_config")


@pytest.mark.parametrize("where", ["text", "top", "nowhere"])
def test_quantisation_is_found_at_both_levels(where):
    full = released_config()
    quantization = full["text_config"].pop("quantization_config")
    if where != "nowhere":
        (full["text_config"] if where == "text" else full)["quantization_config"] = quantization
    assert KimiK3Config.from_dict(full).expert_format == (None if where == "nowhere" else "mxfp4")


def test_text_only_config(tmp_path):
    """The text part alone says model_type kimi_linear: our class reads it when asked directly."""
    check_released(KimiK3Config.from_pretrained(write(tmp_path, released_config()["text_config"])))


def test_reading_does_not_change_the_dict():
    full = released_config()
    before = copy.deepcopy(full)
    KimiK3Config.from_dict(full)
    assert full == before


def test_defaults_are_the_released_model():
    default, released = KimiK3Config().to_dict(), KimiK3Config.from_dict(released_config()).to_dict()
    for settings in (default, released):
        for key in ("dtype", "head_dim", "use_grouped_topk", "quantization_config"):
            settings.pop(key, None)
    assert default == released


def test_saved_config_loads_back(tmp_path):
    for config in (KimiK3Config.from_dict(released_config()), tiny_kimi_k3_config(), KimiK3Config()):
        config.save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        assert written["model_type"] == "kimi_k3" and "expert_format" not in written
        assert ("quantization_config" in written) == (config.expert_format == "mxfp4")
        back = AutoConfig.from_pretrained(tmp_path)
        assert type(back) is KimiK3Config
        assert {**back.to_dict(), "_name_or_path": ""} == config.to_dict()


def test_cache_layers_follow_the_layer_types():
    cache = DynamicCache(config=tiny_kimi_k3_config(5))
    assert [type(layer) for layer in cache.layers] == [LinearAttentionLayer] * 3 + [DynamicLayer] * 2


BAD = {
    "hidden_act='silu'": dict(hidden_act="silu"),
    "mla_use_nope=False": dict(mla_use_nope=False),
    "mla_use_output_gate=False": dict(mla_use_output_gate=False),
    "use_full_rank_gate=False": dict(linear_attn_config=dict(use_full_rank_gate=False)),
    "gate_lower_bound=None": dict(linear_attn_config=dict(gate_lower_bound=None)),
    "gate_lower_bound=-6": dict(linear_attn_config=dict(gate_lower_bound=-6)),
    "gate_lower_bound=0": dict(linear_attn_config=dict(gate_lower_bound=0)),
    "moe_router_activation_func='softmax'": dict(moe_router_activation_func="softmax"),
    "topk_method='greedy'": dict(topk_method="greedy"),
    "num_key_value_heads=2": dict(num_key_value_heads=2),
    "tie_word_embeddings=True": dict(tie_word_embeddings=True),
    "num_nextn_predict_layers=1": dict(num_nextn_predict_layers=1),
    "latent_moe_use_norm=False": dict(latent_moe_use_norm=False),
    "moe_layer_freq=2": dict(moe_layer_freq=2),
    "hidden_size=0": dict(hidden_size=0),
    "q_lora_rank=None": dict(q_lora_rank=None),
    "attn_res_block_size=1.5": dict(attn_res_block_size=1.5),
    "linear_head_dim=-1": dict(linear_attn_config=dict(head_dim=-1)),
    "first_k_dense_replace=10": dict(first_k_dense_replace=10),
    "num_experts_per_token=9": dict(num_experts_per_token=9),
    "num_expert_group=3": dict(num_expert_group=3),
    "topk_group=3": dict(num_expert_group=2, topk_group=3),
    "num_experts_per_token=3": dict(num_expert_group=4, topk_group=1),
    "expert_format='fp8'": dict(expert_format="fp8"),
}


@pytest.mark.parametrize("found", BAD)
def test_bad_settings_are_named(found):
    with pytest.raises(ConfigError) as error:
        tiny_kimi_k3_config(**BAD[found])
    assert found in str(error.value)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    "full, kda",
    [([4, 8], [1, 2, 3, 5, 6, 7]), ([4, 8, 9], [0, 1, 2, 3, 5, 6]), ([4, 8, 9, 1], [1, 2, 3, 5, 6, 7]), ([], [])],
)
def test_layer_lists_must_cover_the_layers_once(full, kda):
    with pytest.raises(ConfigError, match=r"each of the layers 1\.\.9 \(1-based\) exactly once"):
        tiny_kimi_k3_config(9, linear_attn_config=dict(full_attn_layers=full, kda_layers=kda))


def test_a_depth_changed_afterwards_is_noticed():
    config = tiny_kimi_k3_config(9)
    config.num_hidden_layers = 4
    with pytest.raises(ConfigError, match="full_attn_layers"):
        KimiK3ForCausalLM(config)


def test_nested_settings_need_from_dict():
    with pytest.raises(ConfigError, match="from_dict"):
        KimiK3Config(**released_config())


def test_other_quantisations_are_refused():
    for change in (dict(quant_method="gptq"), dict(format="nvfp4-pack-quantized")):
        with pytest.raises(ConfigError, match="mxfp4-pack-quantized"):
            KimiK3Config(quantization_config={**quantization_config(), **change})
    group = quantization_config()
    group["config_groups"]["group_0"]["weights"]["group_size"] = 16
    with pytest.raises(ConfigError, match="group_size=16"):
        KimiK3Config(quantization_config=group)


def test_registered_with_the_auto_classes():
    config = tiny_kimi_k3_config(2)
    assert type(AutoConfig.for_model(**config.to_dict())) is KimiK3Config
    assert type(AutoModelForCausalLM.from_config(config)) is KimiK3ForCausalLM
    assert type(AutoModel.from_config(config)) is KimiK3Model


def test_a_transformers_that_knows_kimi_k3_keeps_its_own(monkeypatch):
    registered = []
    monkeypatch.setattr(AutoConfig, "register", lambda *args, **kwargs: registered.append(args))
    importlib.reload(dcp_compile.models.kimi_k3)
    assert registered == []
