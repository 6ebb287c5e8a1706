# SPDX-License-Identifier: Apache-2.0
"""Does the time to trace and rewrite a model grow no faster than its depth?

Kimi-K3 of 9, 27 and 93 layers with every structural feature and tiny widths: the work per layer is that of the real model,
the weights are not. CPU time of the process, one thread: ``python -m benchmarks.capture_growth [--check] [--out DIR]``.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.measure import RESULTS, save
from dcp_compile import DCPConfig
from dcp_compile.capture import capture
from dcp_compile.compiler import compile_graph
from dcp_compile.models import KimiK3Config
from dcp_compile.parallel import ParallelLayout

DEPTHS = (9, 27, 93)
LIMIT = 1.1
"""Largest exponent e of time ~ layers ** e between the two deepest models."""


def narrow_model(layers: int) -> torch.nn.Module:
    """A Kimi-K3 with attention at every fourth layer and the last, and experts everywhere but in the first."""
    attention = [layer for layer in range(1, layers + 1) if layer % 4 == 0 or layer == layers]
    config = KimiK3Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=layers,
        intermediate_size=48,
        num_attention_heads=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        num_experts=4,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=16,
        routed_expert_hidden_size=16,
        attn_res_block_size=12,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        linear_attn_config={
            "num_heads": 2,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            "full_attn_layers": attention,
            "kda_layers": [layer for layer in range(1, layers + 1) if layer not in attention],
        },
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def measure(layers: int) -> dict[str, float]:
    """CPU seconds of capture, and of all passes for a step and a verify graph."""
    model = narrow_model(layers)
    config = DCPConfig(block_size=8, max_batch_size=1, max_seq_len=64, num_speculative_tokens=3)
    gc.collect()
    started = time.process_time()
    step = capture(model)
    captured = time.process_time()
    compile_graph(step, config, ParallelLayout())
    done = time.process_time()
    return {
        "layers": layers,
        "nodes": len(step.graph.nodes),
        "capture_s": round(captured - started, 2),
        "passes_s": round(done - captured, 2),
        "total_s": round(done - started, 2),
    }


def exponent(shallow: dict[str, float], deep: dict[str, float], name: str) -> float:
    return math.log(deep[name] / shallow[name]) / math.log(deep["layers"] / shallow["layers"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help=f"exit 1 where the exponent is above {LIMIT}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measure(3)  # what is done once per process is not growth
    rows = []
    print(f"{'layers':>6} {'nodes':>7} {'capture s':>10} {'passes s':>9} {'total s':>8} {'exponent':>9}")
    for layers in DEPTHS:
        row = measure(layers)
        if rows:
            row["exponent"] = round(exponent(rows[-1], row, "total_s"), 3)
        rows.append(row)
        print(
            f"{row['layers']:>6} {row['nodes']:>7} {row['capture_s']:>10.2f} {row['passes_s']:>9.2f} "
            f"{row['total_s']:>8.2f} {row.get('exponent', ''):>9}",
            flush=True,
        )
    save("capture_growth", rows, arguments.out)
    return 1 if arguments.check and rows[-1]["exponent"] > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
