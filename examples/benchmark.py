# SPDX-License-Identifier: Apache-2.0
"""Time generate() over all ranks that were started, for several batch sizes.

    torchrun --nproc-per-node 2 examples/benchmark.py --tp-size 2
    accelerate launch --multi_gpu --num_processes 2 examples/benchmark.py

With --tp-size N each rank loads and computes its part of a Kimi-K3; without, every rank holds all of it and the KV cache alone
is spread. `python -m dcp_compile bench` compares one setting with plain transformers.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import dcp_compile
from dcp_compile.models.mini import mini_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=mini_path(), help="model folder (default: the mini Kimi-K3)")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3, help="timed runs, after one that is not")
    options = parser.parse_args()
    disable_progress_bar()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(device)

    parts = {"tp_size": options.tp_size} if options.tp_size > 1 else {}
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto", **parts).to(device)
    length = options.prompt_tokens + options.new_tokens
    config = dcp_compile.DCPConfig(max_batch_size=max(options.batches), max_seq_len=length, num_speculative_tokens=0)
    dcp_size = options.tp_size if options.tp_size > 1 else ranks
    dcp_compile.optimize(model, dcp_size=dcp_size, config=config)
    exactly = {"min_new_tokens": options.new_tokens, "max_new_tokens": options.new_tokens, "do_sample": False}
    first = not dist.is_initialized() or dist.get_rank() == 0
    for batch in options.batches:
        ids = torch.randint(4, model.config.vocab_size, (batch, options.prompt_tokens), device=device)
        if ranks > 1:
            dist.broadcast(ids, 0)
        seconds = []
        for _ in range(options.runs + 1):
            started = time.perf_counter()
            model.generate(ids, attention_mask=torch.ones_like(ids), **exactly)
            seconds.append(time.perf_counter() - started)
        median = statistics.median(seconds[1:])
        if first:
            print(f"batch {batch}: {median:.3f} s, {batch * options.new_tokens / median:.1f} new tokens per second")
    if first:
        print(dcp_compile.explain(model))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
