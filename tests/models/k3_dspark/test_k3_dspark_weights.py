# SPDX-License-Identifier: Apache-2.0
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from dcp_compile.errors import CheckpointError
from dcp_compile.models.k3_dspark import K3DSparkConfig, K3DSparkModel
from tests.models.k3_dspark.tiny_draft import tiny_draft


def expected_tensors() -> dict[str, list[int]]:
    """Names and shapes of the published checkpoint."""
    shapes = {
        "embed_tokens.weight": [163840, 7168],
        "context_proj.weight": [7168, 35840],
        "context_norm.weight": [7168],
        "final_norm.weight": [7168],
        "markov_head.markov_w1.weight": [163840, 256],
        "markov_head.markov_w2.weight": [163840, 256],
        "confidence_head.proj.weight": [1, 7424],
        "confidence_head.proj.bias": [1],
    }
    for i in range(5):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": [7168],
            f"layers.{i}.post_attention_layernorm.weight": [7168],
            f"layers.{i}.self_attn.q_a_proj.weight": [1536, 7168],
            f"layers.{i}.self_attn.q_a_layernorm.weight": [1536],
            f"layers.{i}.self_attn.q_b_proj.weight": [12288, 1536],
            f"layers.{i}.self_attn.kv_a_proj_with_mqa.weight": [576, 7168],
            f"layers.{i}.self_attn.kv_a_layernorm.weight": [512],
            f"layers.{i}.self_attn.kv_b_proj.weight": [16384, 512],
            f"layers.{i}.self_attn.o_proj.weight": [7168, 8192],
            f"layers.{i}.mlp.gate_proj.weight": [14336, 7168],
            f"layers.{i}.mlp.up_proj.weight": [14336, 7168],
            f"layers.{i}.mlp.down_proj.weight": [7168, 14336],
        }
    return shapes


def test_the_published_model_has_exactly_the_published_tensors():
    with torch.device("meta"):
        model = K3DSparkModel(K3DSparkConfig())
        own = model.state_dict()
        model.set_input_embeddings(torch.nn.Embedding(163840, 7168))
    shared = model.state_dict()
    assert {name: list(tensor.shape) for name, tensor in shared.items()} == expected_tensors()
    assert set(shared) - set(own) == {"embed_tokens.weight"}
    assert len(shared) == 68
    assert sum(tensor.numel() for tensor in shared.values()) == 3_562_312_961
    without_heads = [tensor.numel() for name, tensor in own.items() if not name.startswith("confidence_head")]
    assert sum(without_heads) == 2_387_900_416


@pytest.fixture
def folder(tmp_path, seed):
    model = tiny_draft(seed)
    model.save_pretrained(tmp_path)
    return tmp_path


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_save_and_load_round_trip(folder, seed):
    before = tiny_draft(seed)
    after = AutoModel.from_pretrained(folder)
    assert type(after) is K3DSparkModel
    own, loaded = before.config.to_dict(), after.config.to_dict()
    assert {key for key in own | loaded if own.get(key) != loaded.get(key)} <= {"_name_or_path", "dtype"}
    assert after.state_dict().keys() == before.state_dict().keys()
    for name, tensor in before.state_dict().items():
        assert torch.equal(after.state_dict()[name], tensor), name
    assert torch.equal(after.rotary_emb.inv_freq, before.rotary_emb.inv_freq)


def test_loading_in_bfloat16_keeps_float32_tables(folder):
    model = K3DSparkModel.from_pretrained(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.rotary_emb.inv_freq.dtype == torch.float32


def test_the_frozen_embedding_a_head_and_rope_tables_are_skipped(folder):
    def add(tensors):
        tensors["embed_tokens.weight"] = torch.randn(61, 32)
        tensors["lm_head.weight"] = torch.randn(61, 32)
        tensors["rotary_emb.inv_freq"] = torch.full((4,), float("nan"))

    edit(folder, add)
    model, info = K3DSparkModel.from_pretrained(folder, output_loading_info=True)
    assert model.get_input_embeddings() is None
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.isfinite(model.rotary_emb.inv_freq).all()


def test_a_shared_embedding_is_saved_and_skipped_again(folder, tmp_path, seed):
    model = tiny_draft(seed)
    model.set_input_embeddings(torch.nn.Embedding(61, 32))
    model.save_pretrained(tmp_path / "with_embedding")
    assert "embed_tokens.weight" in load_file(tmp_path / "with_embedding" / "model.safetensors")
    assert K3DSparkModel.from_pretrained(tmp_path / "with_embedding").get_input_embeddings() is None


def test_missing_unknown_and_misshapen_tensors_are_listed_together(folder):
    def spoil(tensors):
        del tensors["layers.1.self_attn.o_proj.weight"]
        del tensors["final_norm.weight"]
        tensors["layers.2.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["context_norm.weight"] = torch.zeros(31)

    edit(folder, spoil)
    with pytest.raises(CheckpointError) as caught:
        AutoModel.from_pretrained(folder)
    for part in (
        "4 faults",
        "missing final_norm.weight",
        "missing layers.1.self_attn.o_proj.weight",
        "unknown layers.2.mlp.up_proj.weight",
        "context_norm.weight is [31], expected [32]",
    ):
        assert re.search(re.escape(part), str(caught.value)), part


def test_a_confidence_head_is_skipped_only_when_the_config_disables_it(folder):
    model = K3DSparkModel.from_pretrained(folder, enable_confidence_head=False)
    assert model.confidence_head is None
    model.save_pretrained(folder / "plain")
    with pytest.raises(CheckpointError, match="missing confidence_head.proj.bias"):
        K3DSparkModel.from_pretrained(folder / "plain", enable_confidence_head=True)
    assert K3DSparkModel.from_pretrained(folder).confidence_head is not None
