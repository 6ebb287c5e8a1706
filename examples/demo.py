# SPDX-License-Identifier: Apache-2.0
"""Decode the mini Kimi-K3 over all ranks that were started, without and with its draft, and check the tokens.

    torchrun --nproc-per-node 2 examples/demo.py

Both must be those of plain transformers; the exit status is 1 if they differ.
"""

import os

import torch
import torch.distributed as dist
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.utils.logging import disable_progress_bar

import dcp_compile
from dcp_compile.models.mini import draft_path, mini_path

PROMPT = '''def read_lines(path):
    """Return the lines of a text file, without their line ends."""
'''
NEW_TOKENS = 96


def main() -> int:
    torch.set_num_threads(1)  # the ranks share the cores
    disable_progress_bar()
    ranks, first = int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0"
    tokenizer = AutoTokenizer.from_pretrained(mini_path())
    # float32: at lower precision two orders of summation may pick different tokens where two are almost as likely.
    model = AutoModelForCausalLM.from_pretrained(mini_path(), dtype=torch.float32)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    greedy = {**inputs, "max_new_tokens": NEW_TOKENS, "do_sample": False}

    draft = AutoModel.from_pretrained(draft_path(), dtype=torch.float32)

    dcp_compile.optimize(model, dcp_size=ranks, draft=draft)
    optimised = model.generate(**greedy, streamer=TextStreamer(tokenizer, skip_special_tokens=True))
    before = model._dcp_engine.verify_steps
    drafted = model.generate(**greedy, assistant_model=draft)
    steps = model._dcp_engine.verify_steps - before
    report = dcp_compile.explain(model)

    dcp_compile.unoptimize(model)
    plain = model.generate(**greedy)
    equal = torch.equal(optimised, plain) and torch.equal(drafted, plain)
    if first:
        count = optimised.shape[1] - inputs.input_ids.shape[1]
        verdict = "equal" if equal else "DIFFER FROM"
        each = (count - 1) / max(steps, 1)  # the first token is of the prefill
        print(f"\n{report}\n\nWith the draft: {count} tokens in {steps} verify steps, {each:.2f} per step.")
        print(f"The {count} new tokens of {ranks} ranks, with and without the draft, {verdict} plain Hugging Face greedy decoding.")
    dist.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
