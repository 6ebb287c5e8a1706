# SPDX-License-Identifier: Apache-2.0
"""The shipped mini model: what is in its files, and that it writes Python."""

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import dcp_compile.models  # registers the model with the Auto classes  # noqa: F401
from dcp_compile.models.kimi_k3 import KimiK3ForCausalLM, mxfp4
from dcp_compile.models.mini import mini_path

SAMPLE = Path(__file__).with_name("heldout_sample.txt")  # the beginning of a held-out file
SAMPLE_LOSS = 1.582  # nats per token, measured on the shipped weights


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(mini_path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(mini_path())


def test_has_every_part_of_kimi_k3(model):
    config = model.config
    assert type(model) is KimiK3ForCausalLM
    assert [kind == "full_attention" for kind in config.layer_types] == [i in (3, 7, 8) for i in range(9)]
    assert config.attn_res_block_size == 4 and config.num_hidden_layers % 4  # the last block is partial
    assert hasattr(model.model.layers[0], "mlp") and all(
        hasattr(layer, "block_sparse_moe") for layer in model.model.layers[1:]
    )
    assert config.routed_expert_hidden_size < config.hidden_size and config.num_shared_experts == 2
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()


def test_has_the_head_widths_of_the_large_model(model):
    config = model.config
    assert (config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) == (
        512,
        128,
        64,
        128,
    )
    assert config.linear_head_dim == 128 and config.linear_conv_kernel_dim == 4


def test_every_learned_part_moved_from_its_initial_value(model):
    """Mixture queries, decay scales and selection biases start at 0, norms at 1: none may have stayed there."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "layers.0.self_attention_res_" in name:
            continue  # never used: the first mixture has one source
        initial = 1.0 if name.endswith("norm.weight") else 0.0
        assert tensor.isfinite().all() and (tensor - initial).abs().max() > 1e-3, name


def test_experts_are_stored_in_four_bits():
    with safe_open(str(mini_path() / "model.safetensors"), "pt") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    experts = {name for name in dtypes if ".experts." in name}
    assert len(experts) == 8 * 48 * 6 and all(dtypes[name] == "U8" for name in experts)
    islands = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
    for name in dtypes.keys() - experts:
        assert dtypes[name] == ("F32" if name.endswith(islands) else "BF16"), name


def test_loaded_experts_survive_rounding_unchanged(model):
    """They were trained as what the file holds, so rounding them once more loses nothing."""
    experts = model.model.layers[5].block_sparse_moe.experts
    for weight in (experts.gate_up_proj, experts.down_proj):
        assert torch.equal(mxfp4.decode(*mxfp4.encode(weight.detach())), weight)


def test_files_are_small():
    def size(folder: Path) -> int:
        return sum(
            file.stat().st_size for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts
        )

    assert size(mini_path()) <= 22e6
    assert size(mini_path().parent) <= 32e6


def test_tokenizer_round_trips_and_starts_with_bos(tokenizer, model):
    text = SAMPLE.read_text() + "\tnaïve = '∀'\r\n\n\n        x"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == model.config.bos_token_id
    assert tokenizer.decode(ids[1:]) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (model.config.eos_token_id, model.config.pad_token_id)
    assert len(tokenizer) == model.config.vocab_size


@pytest.mark.parametrize(
    "cut", ["def f(x):\n", "def f(x):\n    ", "def f(x):\n    return", "def f(x):\n    return x\n\n"]
)
def test_a_prompt_may_end_where_an_editor_would(tokenizer, cut):
    """The tokens of the beginning are the first tokens of the whole, so a completion starts as in training."""
    whole = tokenizer("def f(x):\n    return x\n\n\nclass A:\n    pass\n")["input_ids"]
    part = tokenizer(cut)["input_ids"]
    assert whole[: len(part)] == part


def test_heldout_loss(model, tokenizer):
    ids = tokenizer(SAMPLE.read_text(), return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(ids[:, :-1], use_cache=False).logits[0]
    assert F.cross_entropy(logits, ids[0, 1:]).item() == pytest.approx(SAMPLE_LOSS, abs=0.005)


RECTANGLE = """class Rectangle:
    def __init__(self, width, height):
        self.width = width
        self.height = height

    def area(self):
        return"""


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (RECTANGLE, " self.width * self.height\n"),
        ("def read_file(path):\n    with open(path", ", 'rb') as f:\n        return f.read()\n"),
        ("if __name__ ==", " '__main__':\n    unittest.main()\n"),
    ],
)
def test_greedy_completion_is_python(model, tokenizer, prompt, expected):
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    text = tokenizer.decode(out[0, 1:], skip_special_tokens=True)
    assert text.startswith(prompt + expected)
    ast.parse(prompt + expected)
