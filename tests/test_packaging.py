# SPDX-License-Identifier: Apache-2.0
"""The wheel: what is in it, and that it works with the repository out of reach."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKED = ("passes", "kernels", "models")
SOURCES = ("dcp_compile", *LINKED, "pyproject.toml", "README.md", "LICENSE")

# A model of every kind of layer, optimised, run and restored. Imports no test helper: those are not in the wheel.
PROGRAM = """
import sys, torch, dcp_compile
from dcp_compile.models import KimiK3Config, KimiK3ForCausalLM
from dcp_compile.models.mini import mini_path
torch.set_num_threads(1)
torch.manual_seed(0)
config = KimiK3Config(
    vocab_size=32, hidden_size=16, num_hidden_layers=2, intermediate_size=16, num_attention_heads=2, q_lora_rank=8,
    kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, num_experts=4, num_experts_per_token=2,
    moe_intermediate_size=8, routed_expert_hidden_size=8, max_position_embeddings=64,
    linear_attn_config={"num_heads": 2, "head_dim": 4, "full_attn_layers": [2], "kda_layers": [1]},
)
model = KimiK3ForCausalLM(config).eval()
ids = torch.tensor([[3, 1, 4, 1, 5]])
call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
plain = model.generate(**call)
dcp_compile.optimize(model, config=dcp_compile.DCPConfig(max_batch_size=1, max_seq_len=64, block_size=4))
assert torch.equal(model.generate(**call), plain)
assert "1 MLA layers" in dcp_compile.explain(model)
dcp_compile.unoptimize(model)
assert not {"passes", "kernels", "models"} & set(sys.modules)
print(dcp_compile.__file__, mini_path(), sep="\\n")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the sources: building leaves files behind, which a later build would pick up."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", place, source)
    (built,) = place.glob("*.whl")
    return built


def _pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_contents(wheel):
    """Every module and data file of the repository under dcp_compile, and nothing at any other place."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    suffixes = {".py", ".json", ".safetensors", ".png"}
    expected = set()
    for folder in ("dcp_compile", *LINKED):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in suffixes and "__pycache__" not in path.parts and path.is_file():
                place = path.relative_to(ROOT).as_posix()
                expected.add(place if folder == "dcp_compile" else f"dcp_compile/{place}")
    assert {name for name in packed if Path(name).suffix in suffixes} == expected
    assert {name.partition("/")[0] for name in packed} == {"dcp_compile"}


def test_installed_wheel_works_elsewhere(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    _pip("install", "--no-deps", "--target", site, wheel)
    assert not [path for path in site.rglob("*") if path.is_symlink()]
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    package, mini = done.stdout.splitlines()[-2:]
    assert Path(package).is_relative_to(site) and Path(mini).is_relative_to(site)
    for name in ("config.json", "tokenizer.json"):
        assert (Path(mini) / name).is_file()
