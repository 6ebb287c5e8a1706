# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of K3-mini: optimised against plain transformers generate() on the same device.

The peer runs with cuDNN attention off, which is its faster setting by far. Run on a GPU:
``python -m benchmarks.decode_mini [--check] [--out DIR] [--draft PATH]``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import dcp_compile
from benchmarks.measure import RESULTS, save
from dcp_compile.models import K3DSparkModel, KimiK3ForCausalLM  # noqa: F401  (registers both models)
from dcp_compile.models.mini import mini_path

PROMPT = "def read_lines(path):\n"
DTYPES = ["float32", "bfloat16"]


def tokens_per_second(model, ids: torch.Tensor, new: int, repeats: int, **options) -> tuple[float, torch.Tensor]:
    """Median over ``repeats`` of generated tokens per second, prefill included, and the tokens."""
    speeds = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        out = model.generate(ids, max_new_tokens=new, do_sample=False, **options)
        torch.cuda.synchronize()
        speeds.append(new / (time.perf_counter() - started))
    return statistics.median(speeds[1:]), out


def missed(row: dict) -> Iterator[str]:
    """The limits that one data type does not meet; in half precision rounding may choose other tokens."""
    if row["ratio"] < 10:
        yield f"{row['dtype']}: {row['ratio']}x, wanted 10x"
    if row["dtype"] == "torch.float32":
        if not row["same_tokens"]:
            yield "float32 tokens differ from transformers'"
        if not row.get("draft_same_tokens", True):
            yield "float32 tokens with the draft differ from those without"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 below 10x, or where float32 tokens differ")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES, help="some alone have a file of their own")
    arguments = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    tokenizer = AutoTokenizer.from_pretrained(mini_path())
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids.cuda()
    rows, failed = [], []
    for dtype in (getattr(torch, name) for name in arguments.dtypes):
        model = AutoModelForCausalLM.from_pretrained(mini_path(), dtype=dtype).cuda().eval()
        model.generation_config.eos_token_id = None  # every run is as long
        plain, wanted = tokens_per_second(model, ids, arguments.new, 2)
        started = time.perf_counter()
        draft = AutoModel.from_pretrained(arguments.draft, dtype=dtype).cuda().eval() if arguments.draft else None
        dcp_compile.optimize(model, config=dcp_compile.DCPConfig(max_batch_size=1, max_seq_len=2048), draft=draft)
        seconds = time.perf_counter() - started
        ours, tokens = tokens_per_second(model, ids, arguments.new, 3)
        row = {
            "dtype": str(dtype), "backend": model._dcp.report.choice.name, "optimize_s": round(seconds, 1),
            "plain_tokens_per_s": round(plain, 1), "tokens_per_s": round(ours, 1), "ratio": round(ours / plain, 2),
            "same_tokens": bool(torch.equal(wanted, tokens)),
        }  # fmt: skip
        print(row, flush=True)
        if draft is not None:
            speed, drafted = tokens_per_second(model, ids, arguments.new, 3, assistant_model=draft)
            row |= {"draft_tokens_per_s": round(speed, 1), "draft_same_tokens": bool(torch.equal(tokens, drafted))}
            print(row, flush=True)
        rows.append(row)
        name = "decode_mini" if set(arguments.dtypes) == set(DTYPES) else "_".join(["decode_mini", *arguments.dtypes])
        save(name, rows, arguments.out)
        failed += missed(row)
        dcp_compile.unoptimize(model)
    print("missed:", *(failed or ["nothing"]), sep="\n  ")
    return 1 if arguments.check and failed else 0


if __name__ == "__main__":
    sys.exit(main())
