# SPDX-License-Identifier: Apache-2.0
"""What a float8 KV cache costs in accuracy and saves in memory: K3-mini on Python text against the uncompressed cache.

``python -m benchmarks.fp8_cache [--dtypes float32 bfloat16] [--scale 1.0] [--text FILE] [--out DIR]`` on a CPU or a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.measure import RESULTS, save
from dcp_compile import DCPConfig
from dcp_compile.backends import get_backend
from dcp_compile.capture import StepGraph, capture
from dcp_compile.compiler import compile_graph
from dcp_compile.models import KimiK3ForCausalLM  # noqa: F401  (registers the model)
from dcp_compile.models.mini import mini_path
from dcp_compile.parallel import ParallelLayout
from dcp_compile.runtime import Engine

TEXT = Path(__file__).parents[1] / "dcp_compile" / "layout.py"
FLOAT8 = "float8_e4m3fn"
VERIFY_ROWS = 16


class Comparing:
    """A backend's attention over an uncompressed cache, which notes how far off it would be on the same in float8.

    Attributes:
        errors: of every call, ``|out8 - out| / |out|`` over all rows and heads, in the latent space.
    """

    def __init__(self, attend_rows: Callable[..., tuple[Tensor, Tensor]], kv_scale: float):
        self.attend_rows, self.kv_scale = attend_rows, kv_scale
        self.errors: list[float] = []

    def __call__(
        self, q_latent: Tensor, q_rope: Tensor, kv_cache: Tensor, *lengths_and_scale: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        entries = kv_cache.flatten(0, 1).split([q_latent.shape[-1], q_rope.shape[-1]], dim=-1)
        float8 = torch.zeros_like(kv_cache, dtype=torch.float8_e4m3fn)
        torch.ops.dcp.kv_write(*entries, float8, torch.arange(len(entries[0]), device=float8.device), self.kv_scale)
        out, lse = self.attend_rows(q_latent, q_rope, kv_cache, *lengths_and_scale)
        other, _ = self.attend_rows(q_latent, q_rope, float8, *lengths_and_scale, self.kv_scale)
        self.errors.append(float((other.float() - out.float()).norm() / out.float().norm()))
        return out, lse


def engine(captured: StepGraph, tokens: int, **settings: object) -> Engine:
    """A step of at most VERIFY_ROWS rows, without compilation, for one request of ``tokens``."""
    config = DCPConfig(
        max_batch_size=1, max_seq_len=tokens, num_speculative_tokens=VERIFY_ROWS - 1, lowering="eager",
        cuda_graphs=False, decode_layout="flattened", **settings,
    )  # fmt: skip
    return compile_graph(captured, config, ParallelLayout())[0]


def logits_along(engine: Engine, ids: Tensor, prompt: int, rows: int = VERIFY_ROWS) -> Tensor:
    """Logits ``[tokens - prompt + 1, vocab]`` along given ids ``[tokens]``: a prefill, then verify steps of ``rows``."""
    with engine.open(1, len(ids)) as session:
        found = [session.prefill([ids[:prompt]])]
        for given in ids[prompt:].split(rows):
            found.append(session.verify(given[None], [len(given)])[0])
            session.commit([len(given)])
    return torch.cat(found).float()


def greedy(engine: Engine, prompt: Tensor, new: int) -> list[int]:
    with engine.open(1, len(prompt) + new) as session:
        tokens = [session.prefill([prompt]).argmax(dim=-1).cpu()]
        for _ in range(new - 1):
            tokens.append(session.decode(tokens[-1], [True]).argmax(dim=-1).cpu())
    return torch.cat(tokens).tolist()


def bytes_per_token(engine: Engine) -> int:
    caches = [state for ref, state in engine.states.items() if ref.kind == "kv_cache"]
    return sum(cache.shape[-1] * cache.element_size() for cache in caches)


def compare(captured: StepGraph, ids: Tensor, prompt: int, new: int, kv_scale: float = 1.0) -> dict[str, object]:
    """Figures of a float8 cache beside those of a cache in the model's own type.

    Args:
        ids: ``[tokens]`` int64 of a text that both are led along. prompt: tokens of it that the prefill takes.
        new: tokens that both then generate greedily after that prompt; 0 leaves that out.
    """
    tokens = max(len(ids), prompt + new)
    device = next(iter(captured.constants.values())).device
    backend = get_backend("triton" if device.type == "cuda" else "torch")
    exact = engine(captured, tokens, backend=backend.name)
    comparing = Comparing(backend.attend_rows, kv_scale)
    with mock.patch.object(backend, "attend_rows", comparing):
        logits = logits_along(exact, ids, prompt)
    float8 = engine(captured, tokens, kv_cache_dtype=FLOAT8, kv_cache_scale=kv_scale)
    other = logits_along(float8, ids, prompt)
    same = (logits.argmax(dim=-1) == other.argmax(dim=-1)).float().mean()
    figures = {
        "kv_scale": kv_scale, "bytes_per_token": bytes_per_token(exact), "bytes_per_token_float8": bytes_per_token(float8),
        "attention_error_mean": statistics.mean(comparing.errors), "attention_error_largest": max(comparing.errors),
        "logits_error": float((other - logits).norm() / logits.norm()),
        "logits_largest_difference": float((other - logits).abs().max()),
        "positions": len(logits), "same_best_token": float(same),
    }  # fmt: skip
    if new:
        one, two = greedy(exact, ids[:prompt], new), greedy(float8, ids[:prompt], new)
        agree = [a == b for a, b in zip(one, two)]
        figures |= {"greedy_tokens": new, "greedy_same_from_the_start": [*agree, False].index(False)}
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--scale", type=float, default=1.0, help="of the float8 cache")
    parser.add_argument("--text", type=Path, default=TEXT, help="Python source")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prefill")
    parser.add_argument("--along", type=int, default=512, help="tokens of the text behind the prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens generated greedily")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    ids = AutoTokenizer.from_pretrained(mini_path())(arguments.text.read_text(), return_tensors="pt").input_ids[0]
    ids = ids[: arguments.prompt + arguments.along]
    rows = []
    for dtype in arguments.dtypes:
        model = AutoModelForCausalLM.from_pretrained(mini_path(), dtype=getattr(torch, dtype)).eval()
        model = model.cuda() if torch.cuda.is_available() else model
        figures = compare(capture(model), ids, arguments.prompt, arguments.new, arguments.scale)
        rows.append({"dtype": dtype, "text": arguments.text.name, "prompt": arguments.prompt, **figures})
        print(rows[-1], flush=True)
    save("fp8_cache", rows, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
