# SPDX-License-Identifier: Apache-2.0
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

import dcp_compile
from dcp_compile.models.mini import mini_path  # importing dcp_compile.models registers Kimi-K3 with the Auto classes

tokenizer = AutoTokenizer.from_pretrained(mini_path())
model = AutoModelForCausalLM.from_pretrained(mini_path(), dtype=torch.float32)
inputs = tokenizer("def read_lines(path):\n", return_tensors="pt")

dcp_compile.optimize(model, dcp_size=2)
out = model.generate(**inputs, max_new_tokens=48, do_sample=False)
if dist.get_rank() == 0:
    print(tokenizer.decode(out[0], skip_special_tokens=True))
    print(dcp_compile.explain(model))
dcp_compile.unoptimize(model)  # transformers' own generate() again
dist.destroy_process_group()
