# SPDX-License-Identifier: Apache-2.0
"""Continue many prompts: JSON lines in, JSON lines out. The same script runs under torchrun and accelerate launch.

    torchrun --nproc-per-node 2 examples/batch.py prompts.jsonl texts.jsonl
    accelerate launch --multi_gpu --num_processes 2 examples/batch.py prompts.jsonl texts.jsonl

Every input line is an object with "prompt" and, if it likes, other keys; every output line is the same object with "text",
the continuation. (--multi_gpu is accelerate's word for several processes; it starts them without a GPU as well.)
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import dcp_compile
from dcp_compile.models.mini import mini_path


def batches(rows: list[dict], size: int) -> Iterator[list[dict]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--model", default=mini_path(), help="model folder (default: the mini Kimi-K3)")
    parser.add_argument("--batch", type=int, default=8, help="prompts per generate() call")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    options = parser.parse_args()
    disable_progress_bar()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(device)

    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").to(device)
    dcp_compile.optimize(model, dcp_size=ranks, config=dcp_compile.DCPConfig(max_batch_size=options.batch))

    rows = [json.loads(line) for line in options.prompts.read_text().splitlines() if line.strip()]
    texts = []
    for batch in batches(rows, options.batch):
        inputs = tokenizer([row["prompt"] for row in batch], return_tensors="pt", padding=True).to(device)
        out = model.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False)
        texts += tokenizer.batch_decode(out[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    if rank == 0:
        lines = [json.dumps({**row, "text": text}) for row, text in zip(rows, texts)]
        options.texts.write_text("".join(f"{line}\n" for line in lines))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
