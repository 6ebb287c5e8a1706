# SPDX-License-Identifier: Apache-2.0
"""Checkpoints under official names: reading, writing, and every way in which one can fail to fit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from dcp_compile.errors import CheckpointError
from dcp_compile.models import KimiK3Config, KimiK3ForCausalLM, KimiK3Model
from dcp_compile.models.kimi_k3 import mxfp4
from dcp_compile.models.kimi_k3.weights import plan_loading
from tests.models.kimi_k3.official import PREFIX, quantization_config, random_tensors, released_config, tensor_list
from tests.models.kimi_k3.reference import Reference
from tests.tiny_models import tiny_kimi_k3, tiny_kimi_k3_config

ISLANDS = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")


def text_settings(layers=5, **settings):
    """Text part of a config.json with tiny sizes."""
    text = released_config()["text_config"]
    tiny = tiny_kimi_k3_config(layers, **settings).to_dict()
    text.update({key: tiny[key] for key in text if key in tiny and key not in ("dtype", "quantization_config")})
    return text


def write_checkpoint(folder, text, tensors, shards=1, vision=True):
    """A multimodal checkpoint folder as it is published."""
    config = released_config()
    config["text_config"] = text
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config[key] = text[key]
    (folder / "config.json").write_text(json.dumps(config))
    if vision:
        tensors = {
            **tensors,
            "vision_tower.encoder.blocks.0.wqkv.weight": torch.zeros(4, 4),
            "mm_projector.linear_1.bias": torch.zeros(4),
        }
    names = sorted(tensors)
    parts = [names[i::shards] for i in range(shards)]
    index = {"metadata": {"total_size": 0}, "weight_map": {}}
    for number, part in enumerate(parts):
        file = "model.safetensors" if shards == 1 else f"model-{number + 1:05d}-of-{shards:06d}.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, folder / file, metadata={"format": "pt"})
        index["weight_map"].update({name: file for name in part})
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def official(seed, text, **kwargs):
    return random_tensors(tensor_list(text, **kwargs), seed)


def dense_experts(tensors):
    """The checkpoint with every MXFP4 expert decoded, by official names."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("_packed"):
            base = name.removesuffix("_packed")
            out[base] = mxfp4.decode(tensor, tensors[f"{base}_scale"], torch.float64)
        elif not name.endswith("_scale"):
            out[name] = tensor
    return out


def check_loaded(model, tensors):
    """Every parameter is the tensor of the checkpoint, bit for bit."""
    state = model.state_dict()
    dense = dense_experts(tensors)
    for name, tensor in state.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            path = PREFIX + name.rpartition(".")[0]
            matrices = ("w1", "w3") if "gate_up" in name else ("w2",)
            for e in range(tensor.shape[0]):
                wanted = torch.cat([dense[f"{path}.{e}.{matrix}.weight"] for matrix in matrices])
                assert torch.equal(tensor[e].double(), wanted.double()), name
        else:
            wanted = dense[PREFIX + name]
            assert torch.equal(tensor.double(), wanted[: tensor.shape[0]].double()), name


@pytest.mark.parametrize("experts, shards, a_log", [("mxfp4", 1, 16), ("mxfp4", 3, None), ("bf16", 2, 128)])
def test_published_layout(tmp_path, experts, shards, a_log, seed):
    """A folder with the full config, vision tensors, padded A_log and either kind of experts gives our model."""
    text = text_settings()
    tensors = official(seed, text, experts=experts, a_log=a_log)
    model = AutoModelForCausalLM.from_pretrained(write_checkpoint(tmp_path, text, tensors, shards))
    assert type(model) is KimiK3ForCausalLM and not model.training
    assert model.dtype == torch.bfloat16
    assert model.model.layers[0].self_attn.A_log.shape == (4,)
    check_loaded(model, tensors)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == (torch.float32 if name.endswith(ISLANDS) else torch.bfloat16), name


def test_loaded_checkpoint_computes_what_the_reference_does(tmp_path, seed):
    text = text_settings(5)
    tensors = official(seed, text, a_log=9)
    folder = write_checkpoint(tmp_path, text, tensors)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="batched_mm")
    assert all(tensor.dtype == torch.float64 for tensor in model.state_dict().values())
    tokens = torch.randint(128, (1, 5), generator=torch.Generator().manual_seed(seed))
    wanted = Reference(text, dense_experts(tensors)).logits(tokens[0].tolist())
    with torch.no_grad():
        found = model(tokens).logits[0]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9 * wanted.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_requested_dtype(tmp_path, dtype, seed):
    text = text_settings(2)
    folder = write_checkpoint(tmp_path, text, official(seed, text))
    for name, tensor in KimiK3ForCausalLM.from_pretrained(folder, dtype=dtype).state_dict().items():
        assert tensor.dtype == (torch.float32 if name.endswith(ISLANDS) else dtype), name


def test_text_only_folder(tmp_path, seed):
    """No nesting, no prefix: the text part of the config and bare tensor names, read by our class."""
    text = text_settings(2)
    tensors = official(seed, text)
    (tmp_path / "config.json").write_text(json.dumps(text))
    save_file({name.removeprefix(PREFIX): t for name, t in tensors.items()}, tmp_path / "model.safetensors")
    check_loaded(KimiK3ForCausalLM.from_pretrained(tmp_path), tensors)


@pytest.mark.parametrize("size", ["50GB", "60KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load(tmp_path, size, dtype, seed):
    model = tiny_kimi_k3(layers=5, seed=seed, dtype=dtype)
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (size == "60KB")
    written = {}
    for file in tmp_path.glob("*.safetensors"):
        written.update(load_file(file))
    listing = tensor_list(model.config.to_dict(), experts="bf16")
    assert written.keys() == listing.keys()
    for name, (_, shape) in listing.items():
        assert list(written[name].shape) == shape, name
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(back) is KimiK3ForCausalLM and back.config.expert_format is None
    assert list(back.state_dict()) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == back.state_dict()[name].dtype and torch.equal(tensor, back.state_dict()[name]), name


def test_save_mxfp4_and_load(tmp_path, seed):
    model = tiny_kimi_k3(layers=3, seed=seed, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "a", expert_format="mxfp4")
    written = load_file(tmp_path / "a" / "model.safetensors")
    listing = tensor_list(model.config.to_dict())
    assert {name: (t.dtype, list(t.shape)) for name, t in written.items()} == listing
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    wanted = quantization_config()
    for key in ("quant_method", "format"):
        assert config["quantization_config"][key] == wanted[key]
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    check_loaded(back, written)
    for name, tensor in model.state_dict().items():
        loaded = back.state_dict()[name]
        if "experts." in name and "shared" not in name:
            assert (loaded - tensor).float().abs().mean() < 0.15 * tensor.float().abs().mean()
        else:
            assert torch.equal(loaded, tensor)
    back.save_pretrained(tmp_path / "b", expert_format="mxfp4")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in back.state_dict().items())


def test_model_without_head(tmp_path, seed):
    model = tiny_kimi_k3(layers=2, seed=seed)
    model.save_pretrained(tmp_path / "whole")
    bare = AutoModel.from_pretrained(tmp_path / "whole")
    assert type(bare) is KimiK3Model
    assert all(torch.equal(t, bare.state_dict()[name]) for name, t in model.model.state_dict().items())
    bare.save_pretrained(tmp_path / "bare")
    assert PREFIX + "model.norm.weight" in load_file(tmp_path / "bare" / "model.safetensors")
    again = KimiK3Model.from_pretrained(tmp_path / "bare")
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in bare.state_dict().items())
    with pytest.raises(CheckpointError, match="missing language_model.lm_head.weight"):
        KimiK3ForCausalLM.from_pretrained(tmp_path / "bare")


def test_given_state_dict_is_saved(tmp_path, seed):
    model = tiny_kimi_k3(layers=2, seed=seed)
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=state)
    back = KimiK3ForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


EXPERT = PREFIX + "model.layers.1.block_sparse_moe.experts.3."


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


BROKEN = {
    "missing norm": (drop(PREFIX + "model.norm.weight"), "missing language_model.model.norm.weight"),
    "missing expert": (drop(EXPERT + "w1.weight_packed"), "missing " + EXPERT + "w1.weight_packed"),
    "missing scale": (drop(EXPERT + "w2.weight_scale"), "missing " + EXPERT + "w2.weight_scale"),
    "unknown": (put(PREFIX + "model.layers.0.extra.weight", torch.zeros(1)), "unknown .*layers.0.extra.weight"),
    "unknown expert": (
        put(EXPERT.replace(".3.", ".8.") + "w1.weight", torch.zeros(32, 32)),
        r"unknown .*experts\.8\.w1\.weight",
    ),
    "expert twice": (put(EXPERT + "w1.weight", torch.zeros(32, 32)), r"unknown .*experts\.3\.w1\.weight"),
    "wrong shape": (put(PREFIX + "lm_head.weight", torch.zeros(3, 64)), r"lm_head.weight is \[3, 64\], .*\[128, 64\]"),
    "short A_log": (put(PREFIX + "model.layers.0.self_attn.A_log", torch.zeros(3)), r"A_log is \[3\], .*\[4\]"),
    "wrong scale": (
        put(EXPERT + "w3.weight_scale", torch.zeros(32, 2, dtype=torch.uint8)),
        r"w3.weight_scale is \[32, 2\], .*\[32, 1\]",
    ),
    "scales of another type": (
        put(EXPERT + "w3.weight_scale", torch.ones(32, 1)),
        r"experts\.3\.w3\.weight_scale is F32, MXFP4 stores .* as uint8; .* unquantised as .*experts\.3\.w3\.weight$",
    ),
    "codes of another type": (
        put(EXPERT + "w2.weight_packed", torch.zeros(32, 16, dtype=torch.int8)),
        r"experts\.3\.w2\.weight_packed is I8, MXFP4",
    ),
    "twice with and without prefix": (put("lm_head.weight", torch.zeros(128, 64)), "lm_head.weight twice"),
    "a layer of the other kind": (
        put(PREFIX + "model.layers.0.self_attn.q_a_proj.weight", torch.zeros(24, 64)),
        "unknown .*q_a_proj",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_does_not_fit_is_named(tmp_path, case, seed):
    text = text_settings(2)
    tensors = official(seed, text)
    change, message = BROKEN[case]
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(write_checkpoint(tmp_path, text, tensors))


def test_the_type_of_a_given_tensor_is_named_too(seed):
    text = text_settings(2)
    tensors = official(seed, text) | {EXPERT + "w3.weight_scale": torch.ones(32, 1, dtype=torch.bfloat16)}
    parameters = KimiK3ForCausalLM(KimiK3Config(**text)).state_dict()
    with pytest.raises(CheckpointError, match=r"experts\.3\.w3\.weight_scale is bfloat16, MXFP4 stores"):
        plan_loading(parameters, tensors)


def test_long_lists_are_cut(tmp_path, seed):
    text = text_settings(2)
    tensors = {name: t for name, t in official(seed, text).items() if "experts" not in name}
    with pytest.raises(CheckpointError, match=r"and \d+ more") as error:
        AutoModelForCausalLM.from_pretrained(write_checkpoint(tmp_path, text, tensors))
    assert len(str(error.value)) < 4000


def test_bad_requests_are_refused(tmp_path, seed):
    model = tiny_kimi_k3(layers=2, seed=seed)
    with pytest.raises(CheckpointError, match="expert_format='int4'"):
        model.save_pretrained(tmp_path, expert_format="int4")
    narrow = tiny_kimi_k3(layers=2, seed=seed, moe_intermediate_size=24)
    with pytest.raises(CheckpointError, match=r"experts\.0\.w2\.weight cannot be stored as MXFP4: 24 columns"):
        narrow.save_pretrained(tmp_path, expert_format="mxfp4")
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    model.config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        KimiK3ForCausalLM.from_pretrained(tmp_path)


class Header:
    """An entry of a checkpoint of which only shape and type are known."""

    NAMES = {torch.uint8: "U8", torch.bfloat16: "BF16", torch.float32: "F32"}

    def __init__(self, dtype, shape):
        self.dtype, self.shape = dtype, shape

    def get_shape(self):
        return self.shape

    def get_dtype(self):
        return self.NAMES[self.dtype]


def test_released_tensor_list_fits_the_released_config():
    """All 93 layers by name and shape, on no device at all; 16 of the 896 experts stand for all of them."""
    config = released_config()
    with torch.device("meta"):
        whole = KimiK3ForCausalLM(KimiK3Config.from_dict(config))
    parameters = sum(tensor.numel() for tensor in whole.state_dict().values())
    assert round(parameters / 1e9) == 2779
    del whole
    config["text_config"]["num_experts"] = 16
    with torch.device("meta"):
        model = KimiK3ForCausalLM(KimiK3Config.from_dict(config))
    listing = tensor_list(config["text_config"], a_log=128)
    assert len(listing) == 92 * 16 * 6 + 2 * 93 * 3 + 69 * 14 + 24 * 8 + 3 + 92 * 8 + 5
    entries = {name: Header(*entry) for name, entry in listing.items()}
    entries["vision_tower.patch_embed.weight"] = Header(torch.bfloat16, [1])
    assert plan_loading(model.state_dict(), entries).keys() == model.state_dict().keys()
