# SPDX-License-Identifier: Apache-2.0
"""The three commands, in this process and as real processes under torchrun and accelerate launch."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from dcp_compile import cli
from dcp_compile.models.mini import mini_path
from tests.tiny_models import tiny_kimi_k3

ROOT = Path(__file__).parents[1]
PROMPT = "def f(x):\n    return"
SMALL = ["--max-seq-len", "64", "--block-size", "4", "--device", "cpu"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
              "--mixed_precision", "no", "--dynamo_backend", "no"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A tiny Kimi-K3 with the tokenizer of the mini one."""
    place = tmp_path_factory.mktemp("tiny_kimi_k3")
    tiny_kimi_k3(2, vocab_size=4096).save_pretrained(place)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(mini_path() / name, place)
    return str(place)


@pytest.fixture(scope="module")
def plain(folder):
    """``plain(prompts, count)``: what transformers' own generate() continues them with."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)

    def texts(prompts: list[str], count: int) -> list[str]:
        inputs = tokenizer(prompts, return_tensors="pt", padding=True)
        out = model.generate(**inputs, max_new_tokens=count, do_sample=False)
        return tokenizer.batch_decode(out[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)

    return texts


def run(arguments: list[str], **settings) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300, **settings
    )


def test_generate_equals_transformers(folder, plain, capsys):
    assert cli.main(["generate", folder, *SMALL, "--prompt", PROMPT, "--max-new-tokens", "6"]) == 0
    assert capsys.readouterr().out == PROMPT + plain([PROMPT], 6)[0] + "\n"


def test_stream_prints_the_same_text(folder, plain, capsys):
    assert cli.main(["generate", folder, *SMALL, "--prompt", PROMPT, "--max-new-tokens", "6", "--stream"]) == 0
    assert capsys.readouterr().out == PROMPT + plain([PROMPT], 6)[0] + "\n"


def test_drafts_do_not_change_the_text(folder, plain, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert cli.main(["generate", folder, *SMALL, "--prompt", "-", "--max-new-tokens", "9", "--prompt-lookup", "3"]) == 0
    assert capsys.readouterr().out == PROMPT + plain([PROMPT], 9)[0] + "\n"


def test_sampling_follows_its_seed(folder, plain, capsys):
    def sample(*options: str) -> str:
        assert cli.main(["generate", folder, *SMALL, "--prompt", PROMPT, "--max-new-tokens", "8", "--sample", *options]) == 0
        return capsys.readouterr().out

    assert sample("--seed", "1") == sample("--seed", "1") != sample("--seed", "2")
    assert sample("--top-k", "1", "--temperature", "3") == PROMPT + plain([PROMPT], 8)[0] + "\n"


def test_explain(folder, capsys):
    assert cli.main(["explain", folder, *SMALL, "--layout", "flattened"]) == 0
    report = capsys.readouterr().out
    assert "1 MLA layers absorbed" in report and "layout flattened" in report and "block 4" in report


def test_bench_json(folder, capsys):
    assert cli.main(["bench", folder, *SMALL, "--batch", "2", "--prompt-tokens", "5", "--new-tokens", "3", "--runs", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens_equal"] is True
    assert (result["batch"], result["new_tokens"], result["device"], result["dtype"]) == (2, 3, "cpu", "float32")
    for side in ("plain", "optimised"):
        row = result[side]
        assert row["tokens_per_second"] == pytest.approx(2 / row["seconds_per_token"])
        assert row["seconds_to_first_token"] > 0
    assert result["speedup"] == pytest.approx(result["plain"]["seconds_per_token"] / result["optimised"]["seconds_per_token"])


def test_bench_table(folder, capsys):
    assert cli.main(["bench", folder, *SMALL, "--prompt-tokens", "5", "--new-tokens", "3", "--runs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and "tokens/s" in lines[1] and lines[3].endswith("greedy tokens equal")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--block-size", "3", "--interleave", "2"], "kv_interleave=2 does not divide block_size=3"),
        (["--backend", "none"], "unknown attention backend 'none'"),
        (["--dcp-size", "2"], "start it with torchrun"),
        (["--max-seq-len", "4"], "max_seq_len is 4"),
    ],
)
def test_errors_are_one_line(folder, arguments, message, capsys):
    assert cli.main(["generate", folder, "--device", "cpu", "--prompt", PROMPT, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert not captured.out


@pytest.mark.parametrize(("environment", "message"), [
    ({"RANK": "abc"}, "RANK='abc' in the environment is not a number"),
    ({"WORLD_SIZE": "-2"}, "WORLD_SIZE='-2' in the environment is not a number"),
    ({"WORLD_SIZE": "2", "RANK": "0"}, "rank 0: error: WORLD_SIZE is set, but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
])  # fmt: skip
def test_ranks_that_torchrun_did_not_start(folder, environment, message, capsys, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["explain", folder, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.endswith("start ranks with torchrun\n")


def test_missing_folder(tmp_path, capsys):
    assert cli.main(["explain", str(tmp_path / "missing"), "--device", "cpu"]) == 2
    assert "missing" in capsys.readouterr().err


def test_folders_that_hold_no_model(folder, tmp_path, capsys):
    empty, other, cut = (tmp_path / name for name in ("empty", "other", "cut"))
    empty.mkdir()
    other.mkdir()
    (other / "config.json").write_text('{"hidden_size": 3}')
    shutil.copytree(folder, cut)
    (weights,) = cut.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    for place in (empty, other, cut):
        assert cli.main(["explain", str(place), "--device", "cpu"]) == 2
        error = capsys.readouterr().err
        assert f"error: {place} cannot be loaded: " in error


@pytest.mark.parametrize("option", [
    ["bench", "--new-tokens", "1"], ["bench", "--runs", "0"], ["bench", "--batch", "x"], ["explain", "--dcp-size", "0"],
    ["generate", "--seed", str(2**64)], ["generate", "--temperature", "0"],
    ["generate", "--temperature", "1e-300"], ["generate", "--temperature", "inf"], ["generate", "--top-k", "-3"],
    ["generate", "--top-p", "1.5"],
])  # fmt: skip
def test_bad_numbers_are_usage_errors(folder, option, capsys):
    command, *option = option
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, folder, *option])
    assert stopped.value.code == 2 and option[0] in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "explain", "bench"])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0 and "--dcp-size" in capsys.readouterr().out


def test_two_ranks_print_once(folder, plain):
    done = run([*TORCHRUN, "-m", "dcp_compile", "generate", folder, *SMALL, "--prompt", PROMPT, "--max-new-tokens", "6"])
    assert done.returncode == 0, done.stderr
    assert done.stdout == PROMPT + plain([PROMPT], 6)[0] + "\n"


def test_two_ranks_bench_once(folder):
    sizes = ["--prompt-tokens", "5", "--new-tokens", "3", "--runs", "1", "--json"]
    done = run([*TORCHRUN, "-m", "dcp_compile", "bench", folder, *SMALL, *sizes])
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["dcp_size"] == 2 and result["tokens_equal"] is True


def test_batch_example(folder, plain, tmp_path):
    """JSON lines in, JSON lines out, other keys kept, over two ranks; prompts of different lengths in one batch. Started by
    accelerate; the other examples are started by torchrun."""
    prompts = ["import", "def f(x):\n    return x + 1\n", "class"]
    source, texts = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"id": i, "prompt": prompt}) + "\n" for i, prompt in enumerate(prompts)))
    done = run([*ACCELERATE, "examples/batch.py", str(source), str(texts), "--model", folder, "--batch", "2",
                "--max-new-tokens", "5"], cwd=ROOT)  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in texts.read_text().splitlines()]
    assert [row["id"] for row in rows] == [0, 1, 2]
    assert [row["text"] for row in rows] == [*plain(prompts[:2], 5), *plain(prompts[2:], 5)]


def test_readme_example_is_the_file():
    """The example in the README is examples/generate.py, which `test_generate_example` runs."""
    code = (ROOT / "examples" / "generate.py").read_text().partition("\n")[2]
    assert f"```python\n{code}```" in (ROOT / "README.md").read_text()
    assert len([line for line in code.splitlines() if line.strip()]) <= 17


def test_generate_example():
    done = run([*TORCHRUN, "examples/generate.py"], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def read_lines(path):\n") and "MLA layers absorbed" in done.stdout


def test_parts_over_two_nodes(folder, plain):
    """One torchrun per node, as the example says, both on this host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    nodes = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port]
    with ThreadPoolExecutor() as pool:
        program = ["examples/parts.py", "--model", folder, "--prompt", PROMPT]
        commands = [[*TORCHRUN[:2], *nodes, "--node-rank", rank, *program] for rank in "01"]
        first, second = pool.map(lambda command: run(command, cwd=ROOT), commands)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout.startswith(PROMPT + plain([PROMPT], 48)[0])
    assert "tp 2 (this is 0)" in first.stdout and "one of 2 parts, experts sliced" in first.stdout
    assert second.stdout == ""


def test_benchmark_example(folder):
    small = ["--model", folder, "--tp-size", "2", "--prompt-tokens", "5", "--new-tokens", "3", "--runs", "1"]
    done = run([*ACCELERATE, "examples/benchmark.py", *small], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["batch 1", "batch 4"]
    assert all(float(line.split()[4]) > 0 for line in lines[:2])


def test_demo_checks_itself():
    done = run([*TORCHRUN, "examples/demo.py"], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "equal plain Hugging Face greedy decoding" in done.stdout.splitlines()[-1]
