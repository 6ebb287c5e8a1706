# SPDX-License-Identifier: Apache-2.0
import json
import math

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from dcp_compile.errors import ConfigError
from dcp_compile.models.k3_dspark import K3DSparkConfig, K3DSparkModel
from dcp_compile.models.k3_dspark.rope import (
    DSparkRotaryEmbedding,
    inverse_frequencies,
    softmax_scale,
    table_multiplier,
)
from tests.models.k3_dspark.tiny_draft import PUBLISHED_CONFIG, tiny_config

PUBLISHED_ROPE = PUBLISHED_CONFIG["rope_parameters"]


def published(**changes):
    config = json.loads(json.dumps(PUBLISHED_CONFIG))
    config.update(changes)
    return config


def test_auto_config_reads_the_published_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_CONFIG))
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is K3DSparkConfig
    for key, value in PUBLISHED_CONFIG.items():
        if key not in ("rope_theta", "torch_dtype"):
            assert getattr(config, key) == value, key
    assert config.dtype == torch.bfloat16
    assert (config.block_size, config.hidden_act, config.is_causal) == (7, "silu", False)
    assert "attention_factor" not in config.rope_parameters


@pytest.mark.parametrize("absent", sorted(set(PUBLISHED_CONFIG) - {"model_type", "torch_dtype"}))
def test_an_absent_key_takes_the_published_value(absent):
    config = published()
    del config[absent]
    config = K3DSparkConfig.from_dict(config)
    if absent != "rope_theta":  # kept inside rope_parameters
        assert getattr(config, absent, False) == PUBLISHED_CONFIG[absent]


def test_the_default_config_is_the_published_one_and_survives_a_round_trip(tmp_path):
    config = K3DSparkConfig()
    config.save_pretrained(tmp_path)
    assert K3DSparkConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()
    for key in set(PUBLISHED_CONFIG) - {"rope_theta", "torch_dtype", "mla_use_nope", "mla_use_output_gate"}:
        assert getattr(config, key) == PUBLISHED_CONFIG[key]


def test_block_size_has_two_spellings_and_a_default():
    assert tiny_config().block_size == 7
    assert tiny_config(dspark_block_size=5).block_size == 5
    assert tiny_config(block_size=4, dspark_block_size=5).block_size == 4


def test_causality_is_the_key_itself_then_the_dflash_key_then_false():
    assert tiny_config().is_causal is False
    assert tiny_config(is_causal=True).is_causal is True
    assert tiny_config(dflash_config={"causal": True}).is_causal is True
    assert tiny_config(is_causal=False, dflash_config={"causal": True}).is_causal is False
    assert tiny_config(layer_types=["full_attention"] * 2).is_causal is False


@pytest.mark.parametrize(
    "change, names",
    [
        ({"mla_use_nope": True}, "mla_use_nope"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate"),
        ({"mla_use_qk_norm": True}, "mla_use_qk_norm"),
        ({"dspark_bonus_anchor": True}, "dspark_bonus_anchor"),
        ({"sample_from_anchor": False}, "sample_from_anchor"),
        ({"fc_norm": True}, "fc_norm"),
        ({"aux_hidden_stream": "attn_res"}, "aux_hidden_stream"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"markov_head_type": "gated"}, "markov_head_type='gated'"),
        ({"markov_head_type": "rnn"}, "markov_head_type='rnn'"),
        ({"n_routed_experts": 8}, "n_routed_experts"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"transformer_layer_config": {"head_dim": 64}}, "transformer_layer_config"),
        ({"q_lora_rank": None}, "q_lora_rank is None"),
        ({"num_key_value_heads": 16}, "grouped-query"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size=32000"),
        ({"mask_token_id": 163840}, "mask_token_id=163840"),
        ({"mask_token_id": -1}, "mask_token_id=-1"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"num_target_layers": 93}, "num_target_layers=93"),
        ({"target_layer_ids": [2, 23, 47, 71, 93]}, "within the 93 layers"),
        ({"target_layer_ids": [2, 23, 71, 47, 89]}, "ascending"),
        ({"target_layer_ids": [2, 23, 23, 71, 89]}, "distinct"),
        ({"target_layer_ids": [-1, 23, 47, 71, 89]}, "lie within"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [1, 2, 3, 4, 5]}}, "dflash_config"),
        ({"dflash_config": {"mask_token_id": 5}}, "dflash_config"),
        ({"layer_types": ["full_attention"] * 4 + ["sliding_attention"]}, "sliding_attention"),
        ({"rope_theta": 10000.0}, "rope_theta=10000.0 contradicts"),
        ({"rope_parameters": {**PUBLISHED_ROPE, "rope_type": "llama3"}}, "llama3"),
        ({"rope_parameters": {**PUBLISHED_ROPE, "truncate": False}}, "truncate"),
        ({"rope_parameters": {**PUBLISHED_ROPE, "attention_factor": 1.3}}, "attention_factor"),
        ({"rope_parameters": {**PUBLISHED_ROPE, "factor": 0.5}}, "factor"),
        ({"rope_parameters": {**PUBLISHED_ROPE, "factor": "32"}}, r"\['factor'\]='32' must be a number"),
        ({"rope_parameters": {**PUBLISHED_ROPE, "rope_theta": None}}, r"\['rope_theta'\]=None must be a number"),
        ({"rope_parameters": {**PUBLISHED_ROPE, "original_max_position_embeddings": None}}, "YaRN without original_max"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim=63"),
        ({"block_size": 0}, "block_size=0"),
        ({"markov_rank": 0}, "markov_rank=0"),
        ({"architectures": ["DSparkDraftModel"]}, "DSparkDraftModel"),
        ({"model_type": "qwen3", "architectures": ["DSparkDraftModel"]}, "qwen3.*DSparkDraftModel"),
    ],
)
def test_other_layouts_and_bad_values_are_refused_by_name(change, names):
    with pytest.raises(ConfigError, match=names):
        K3DSparkConfig.from_dict(published(**change))


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_the_target_must_be_the_one_the_draft_was_made_for(key):
    config = tiny_config(target_hidden_size=32)

    class Target(PreTrainedConfig):
        model_type = "some_target"

    target = Target(vocab_size=61, hidden_size=32, num_hidden_layers=5)
    config.check_target(target)
    setattr(target, key, 7)
    with pytest.raises(ConfigError, match=f"with {key}=.*has 7"):
        config.check_target(target)


def test_yarn_frequencies_and_softmax_scale_have_the_published_values():
    frequencies = inverse_frequencies(64, PUBLISHED_ROPE)
    plain = [50000.0 ** (-i / 32) for i in range(32)]
    assert frequencies[:16] == pytest.approx(plain[:16], rel=1e-14)
    assert frequencies[26:] == pytest.approx([f / 32 for f in plain[26:]], rel=1e-14)
    for i in range(16, 26):
        ramp = (i - 15) / 11
        assert frequencies[i] == pytest.approx(plain[i] * (1 - ramp) + plain[i] / 32 * ramp, rel=1e-14)
    assert softmax_scale(192, PUBLISHED_ROPE) == pytest.approx(0.13086079996295005, rel=1e-15)
    assert table_multiplier(PUBLISHED_ROPE) == 1.0


def test_attention_factor_one_and_plain_rope_leave_the_scale_alone():
    plain = {"rope_type": "default", "rope_theta": 50000.0}
    assert inverse_frequencies(64, plain) == [50000.0 ** (-i / 32) for i in range(32)]
    for rope in (plain, {**PUBLISHED_ROPE, "attention_factor": 1.0}):
        assert softmax_scale(192, rope) == 192**-0.5
        assert table_multiplier(rope) == 1.0


def test_without_mscale_keys_the_magnitude_moves_from_the_scale_to_the_tables():
    rope = {key: value for key, value in PUBLISHED_ROPE.items() if not key.startswith("mscale")}
    assert softmax_scale(192, rope) == 192**-0.5
    assert table_multiplier(rope) == pytest.approx(0.1 * math.log(32) + 1)


def test_rope_tables_stay_float32_and_exact_at_the_longest_position():
    rotary = DSparkRotaryEmbedding(64, PUBLISHED_ROPE).to(torch.bfloat16).half()
    assert rotary.inv_freq.dtype == torch.float32
    assert torch.equal(rotary.inv_freq, torch.tensor(inverse_frequencies(64, PUBLISHED_ROPE), dtype=torch.float32))
    positions = torch.tensor([[0, 1, 4095, 1048575]])
    cos, sin = rotary(positions)
    assert cos.dtype == sin.dtype == torch.float32
    # One rounding of the angle in float32: half a unit in the last place of 1048575 radians is 2^-5.
    exact = positions[..., None].double() * rotary.inv_freq.double()
    allowed = exact * 2.0**-24 + 1e-6
    assert ((cos - exact.cos()).abs() <= allowed).all()
    assert ((sin - exact.sin()).abs() <= allowed).all()


def test_a_model_that_is_moved_to_where_it_is_keeps_its_tables():
    model = K3DSparkModel(tiny_config())
    before = model.rotary_emb.inv_freq
    assert model.to("cpu").float().rotary_emb.inv_freq is before


def test_materialising_a_meta_model_fills_the_tables():
    with torch.device("meta"):
        model = K3DSparkModel(tiny_config())
    model = model.to_empty(device="cpu")
    expected = inverse_frequencies(8, model.config.rope_parameters)
    assert torch.equal(model.rotary_emb.inv_freq, torch.tensor(expected, dtype=torch.float32))
