# SPDX-License-Identifier: Apache-2.0
"""A user's program: the same text as for one process, started by torchrun. It writes what each rank got to FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import dcp_compile
from dcp_compile import DCPConfig
from tests.tiny_models import tiny_deepseek_v3


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    model = tiny_deepseek_v3(2)
    prompt = torch.tensor([[5, 9, 11, 3, 70], [8, 7, 6, 5, 4]])
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    plain = model.generate(prompt, **options)
    dcp_compile.optimize(model, dcp_size=2, config=DCPConfig(block_size=4, max_batch_size=2, max_seq_len=32))
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)  # every rank draws other numbers; the leader's count
    sampled = model.generate(prompt, **options | {"do_sample": True})
    compiled = model.generate(prompt, **options)
    looked_up = model.generate(prompt, prompt_lookup_num_tokens=3, **options)
    report = {
        "same": [compiled.equal(plain), looked_up.equal(plain)],
        "sampled": sampled.tolist(),
        "text": dcp_compile.explain(model),
    }
    (folder / f"{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
