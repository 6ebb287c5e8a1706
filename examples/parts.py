# SPDX-License-Identifier: Apache-2.0
"""Load Kimi-K3 in parts, one per rank, and generate: no rank ever holds the whole model.

    torchrun --nproc-per-node 2 examples/parts.py
    accelerate launch --multi_gpu --num_processes 2 examples/parts.py

Over two nodes, each of which has the model folder, start one command on each; HOST is the first node's address:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr HOST --master-port 29500 examples/parts.py
    torchrun --nnodes 2 --node-rank 1 --nproc-per-node 1 --master-addr HOST --master-port 29500 examples/parts.py

(GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names the network interface where there are several.)
"""

import argparse
import os

import torch
import torch.distributed as dist
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import dcp_compile
from dcp_compile.models.mini import mini_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=mini_path(), help="Kimi-K3 folder (default: the mini one)")
    parser.add_argument("--draft", help="K3 DSpark draft, split in the same way")
    parser.add_argument("--prompt", default="def read_lines(path):\n")
    parser.add_argument("--expert-parallel", action="store_true", help="deal experts whole to the ranks")
    options = parser.parse_args()
    ranks = int(os.environ["WORLD_SIZE"])
    place = {"dtype": torch.float32}
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        place = {"dtype": "auto", "device_map": torch.device("cuda", torch.cuda.current_device())}

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, tp_size=ranks, expert_parallel=options.expert_parallel, **place
    )
    draft = AutoModel.from_pretrained(options.draft, tp_size=ranks, **place) if options.draft else None
    inputs = tokenizer(options.prompt, return_tensors="pt").to(model.device)

    dcp_compile.optimize(model, draft=draft)  # tp_size is the model's; the KV cache goes over all its ranks
    out = model.generate(**inputs, assistant_model=draft, max_new_tokens=48, do_sample=False)
    if dist.get_rank() == 0:
        print(tokenizer.decode(out[0], skip_special_tokens=True))
        print(dcp_compile.explain(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
