# SPDX-License-Identifier: Apache-2.0
"""The triton backend behind the steps of a model, on a GPU or in Triton's interpreter, against the torch backend."""

from __future__ import annotations

import pytest
import torch

from benchmarks.fp8_cache import logits_along
from dcp_compile.backends import get_backend
from dcp_compile.capture import StepGraph, capture
from dcp_compile.compiler import compile_graph
from dcp_compile.config import DCPConfig
from dcp_compile.parallel import ParallelLayout
from tests.tiny_models import tiny_deepseek_v3

if not torch.cuda.is_available():
    import tests.kernels.interpreter  # noqa: F401

FLOAT8 = {"kv_cache_dtype": "float8_e4m3fn", "kv_cache_scale": 0.3}


@pytest.fixture(scope="module")
def step() -> StepGraph:
    model = tiny_deepseek_v3(2, first_k_dense_replace=2)
    return capture(model.cuda() if torch.cuda.is_available() else model)


@pytest.mark.parametrize("layout", ["split", "flattened"])
@pytest.mark.parametrize("cache", [{}, FLOAT8], ids=["float32", "float8"])
def test_logits_are_those_of_the_reference(
    step: StepGraph, layout: str, cache: dict, monkeypatch: pytest.MonkeyPatch, fresh_seed: int
) -> None:
    """A prefill in chunks, then verify steps; a latent that float32 rounding tips to the next float8 is allowed for."""
    ids = torch.randint(3, 100, (15,), generator=torch.Generator().manual_seed(fresh_seed))
    config = DCPConfig(
        block_size=4, max_batch_size=1, max_seq_len=16, num_speculative_tokens=2, prefill_chunk=4, decode_layout=layout,
        backend="torch", lowering="eager", cuda_graphs=False, **cache,
    )  # fmt: skip

    def logits() -> torch.Tensor:
        return logits_along(compile_graph(step, config, ParallelLayout())[0], ids, 9, rows=3)

    wanted, calls = logits(), []
    for name in ("attend_rows", "attend_prefix", "attend_tail"):  # the engine asks the torch backend, which is for any device
        call = getattr(get_backend("triton"), name)
        monkeypatch.setattr(get_backend("torch"), name, lambda *operands, call=call: calls.append(call) or call(*operands))
    error = float((logits() - wanted).norm() / wanted.norm())
    assert calls and error < (3e-3 if cache else 1e-5), error
