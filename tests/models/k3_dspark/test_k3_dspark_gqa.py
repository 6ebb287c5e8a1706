# SPDX-License-Identifier: Apache-2.0
"""The draft with grouped-query attention."""

import json

import pytest
import torch
from transformers import AutoModel, DynamicCache, Qwen3Config, Qwen3Model

from dcp_compile.errors import CheckpointError, ConfigError
from dcp_compile.models.k3_dspark import DSparkDraftConfig, DSparkDraftModel, K3DSparkModel, load_draft
from dcp_compile.models.k3_dspark.training import parallel_blocks
from tests.generation.helpers import tiny_qwen3
from tests.models.k3_dspark.tiny_draft import target_heads, tiny_draft
from tests.models.k3_dspark.tiny_gqa_draft import gqa_draft, settings


def test_the_published_geometry_has_62_tensors_and_its_parameter_count():
    config = DSparkDraftConfig(
        vocab_size=163840,
        hidden_size=7168,
        intermediate_size=14336,
        num_hidden_layers=5,
        num_attention_heads=64,
        num_key_value_heads=16,
        head_dim=64,
        target_layer_ids=[7, 23, 51, 67, 83],
        num_target_layers=93,
        mask_token_id=163824,
    )
    with torch.device("meta"):
        tensors = DSparkDraftModel(config).state_dict()
    assert len(tensors) == 62
    assert sum(tensor.numel() for tensor in tensors.values()) == 2_249_289_601
    assert list(tensors["fc.weight"].shape) == [7168, 35840]
    assert list(tensors["layers.4.self_attn.k_proj.weight"].shape) == [1024, 7168]
    assert list(tensors["layers.4.self_attn.k_norm.weight"].shape) == [64]


@pytest.mark.parametrize("causal_model", [True, False])
def test_layers_equal_those_of_qwen3(seed, causal_model):
    """A causal block with no context is a Qwen3 decoder; a bidirectional one is its layers without the mask."""
    draft = gqa_draft(seed, is_causal=causal_model)
    plain = Qwen3Config(
        **{key: settings()[key] for key in settings() if key not in ("architectures", "model_type", "dflash_config")}
    )
    plain.is_causal = causal_model
    plain._attn_implementation = "eager"
    qwen = Qwen3Model(plain).eval()
    shared = {k: v for k, v in draft.state_dict().items() if k.startswith(("layers.", "norm."))}
    missing, unexpected = qwen.load_state_dict(shared, strict=False)
    assert missing == ["embed_tokens.weight"] and not unexpected
    embeds, positions = torch.randn(2, 9, 32), torch.arange(9).expand(2, -1)
    with torch.no_grad():
        expected = qwen(inputs_embeds=embeds, position_ids=positions).last_hidden_state
        hidden = draft(inputs_embeds=embeds, position_ids=positions)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_context_keys_and_values_skip_the_input_layernorm(seed, attention):
    model = gqa_draft(seed)
    model.config._attn_implementation = attention
    taps, embeds = torch.randn(2, 5, 96), torch.randn(2, 3, 32)
    cache, positions = DynamicCache(), torch.arange(5).expand(2, -1)
    with torch.no_grad():
        model.ingest(model.project_context(taps), positions, cache)
        wide = taps @ model.fc.weight.T
        context = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * model.hidden_norm.weight
        value = (context @ model.layers[1].self_attn.v_proj.weight.T).view(2, 5, 2, 8).transpose(1, 2)
        torch.testing.assert_close(cache.layers[1].values, value, rtol=1e-4, atol=1e-4)
        hidden = model(inputs_embeds=embeds, position_ids=5 + torch.arange(3).expand(2, -1), cache=cache)
    assert hidden.shape == (2, 3, 32) and cache.layers[0].keys.shape == (2, 2, 8, 8)


def test_drafting_and_parallel_training_work_as_for_the_latent_draft(seed):
    model = gqa_draft(seed, dtype=torch.float64)
    embed, head = target_heads(model, seed)
    taps, ids = torch.randn(1, 9, 96, dtype=torch.float64), torch.arange(9)[None]
    anchors = torch.tensor([[2, 6]])
    with torch.no_grad():
        hidden = parallel_blocks(model, taps, ids, anchors, 5, embed)
    for a, anchor in enumerate([2, 6]):
        cache = DynamicCache()
        with torch.no_grad():
            model.ingest(model.project_context(taps[:, :anchor]), torch.arange(anchor)[None], cache)
        block = model.draft_block(ids[:, anchor], anchor, cache, embed, head, 5)
        torch.testing.assert_close(head(hidden[:, a]), block.base_logits)
        assert cache.get_seq_length() == anchor


def test_load_draft_picks_the_model_the_config_names(tmp_path, seed):
    gqa_draft(seed).save_pretrained(tmp_path / "gqa")
    tiny_draft(seed).save_pretrained(tmp_path / "mla")
    config = json.loads((tmp_path / "gqa" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("qwen3", ["DSparkDraftModel"])
    loaded = load_draft(tmp_path / "gqa", dtype=torch.float64)
    assert type(loaded) is DSparkDraftModel and loaded.dtype == torch.float64
    for name, tensor in gqa_draft(seed).state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.double()), name
    assert type(load_draft(tmp_path / "mla")) is K3DSparkModel
    config["architectures"] = ["Qwen3ForCausalLM"]
    (tmp_path / "gqa" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM"):
        load_draft(tmp_path / "gqa")


@pytest.mark.parametrize("architecture", ["DSparkDraftModel", "Qwen3DSparkModel"])
def test_auto_model_goes_by_the_architecture(tmp_path, seed, architecture):
    """A Qwen3 config with one of the draft's names is a draft, with any other a language model, as before."""
    draft = gqa_draft(seed)
    draft.save_pretrained(tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text()) | {"architectures": [architecture]}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    loaded = AutoModel.from_pretrained(tmp_path / "draft", dtype=torch.float64, block_size=5)
    assert isinstance(loaded, DSparkDraftModel) and type(loaded).__name__ == architecture
    assert isinstance(loaded.config, DSparkDraftConfig) and loaded.config.block_size == 5
    assert loaded.config.target_layer_ids == draft.config.target_layer_ids and loaded.dtype == torch.float64
    for name, tensor in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.double()), name
    taps = torch.randn(1, 4, loaded.context_proj.in_features, dtype=torch.float64)
    same = load_draft(tmp_path / "draft", dtype=torch.float64)
    torch.testing.assert_close(loaded.project_context(taps), same.project_context(taps), rtol=0, atol=0)
    assert torch.equal(loaded.rotary_emb.inv_freq, same.rotary_emb.inv_freq)
    tiny_qwen3().save_pretrained(tmp_path / "language_model")
    assert type(AutoModel.from_pretrained(tmp_path / "language_model")) is Qwen3Model


def test_loading_is_as_strict_as_for_the_latent_draft(tmp_path, seed):
    model = gqa_draft(seed)
    own = dict(model.state_dict())
    model.save_pretrained(tmp_path, state_dict={**own, "embed_tokens.weight": torch.zeros(61, 32)})
    load_draft(tmp_path)
    del own["norm.weight"]
    model.save_pretrained(tmp_path, state_dict={**own, "d2t": torch.zeros(61)})
    with pytest.raises(CheckpointError, match="missing norm.weight; unknown d2t"):
        load_draft(tmp_path)


@pytest.mark.parametrize(
    "change, names",
    [
        ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id is missing"),
        ({"dflash_config": {"mask_token_id": 60}}, "target_layer_ids is missing"),
        ({"num_target_layers": None}, "num_target_layers is missing"),
        ({"num_target_layers": 4}, "within the 4 layers"),
        ({"target_layer_ids": [1, 2, 3]}, "dflash_config has target_layer_ids"),
        ({"mask_token_id": 3}, "dflash_config has mask_token_id"),
        ({"draft_vocab_size": 32}, "draft_vocab_size=32"),
        ({"num_key_value_heads": 4}, "no multiple"),
        ({"head_dim": 0}, "head_dim=0"),
        ({"block_size": 0}, "block_size=0"),
        ({"markov_head_type": "rnn"}, "markov_head_type='rnn'"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"attention_bias": True}, "attention_bias"),
        ({"transformer_layer_config": {"head_dim": 8}}, "transformer_layer_config"),
        ({"architectures": ["LlamaModel"]}, "LlamaModel"),
    ],
)
def test_other_layouts_and_bad_values_are_refused_by_name(change, names):
    with pytest.raises(ConfigError, match=names):
        DSparkDraftConfig.from_dict(settings(**change))


def test_causality_comes_from_the_key_or_the_dflash_config():
    nested = settings()["dflash_config"]
    assert DSparkDraftConfig.from_dict(settings()).is_causal is False
    assert DSparkDraftConfig.from_dict(settings(dflash_config={**nested, "causal": True})).is_causal is True
    assert (
        DSparkDraftConfig.from_dict(settings(is_causal=False, dflash_config={**nested, "causal": True})).is_causal
        is False
    )
