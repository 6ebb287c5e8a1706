# SPDX-License-Identifier: Apache-2.0
"""Settings that reach the compiled model: the cache's element type, and refusal of what does not exist."""

from __future__ import annotations

import pytest
import torch

import dcp_compile
from dcp_compile.capture import capture
from dcp_compile.compiler import compile_graph
from dcp_compile.errors import ConfigError
from dcp_compile.parallel import ParallelLayout
from tests.tiny_models import tiny_deepseek_v3

SMALL = {"block_size": 4, "max_batch_size": 2, "max_seq_len": 64, "num_speculative_tokens": 0}


@pytest.fixture(scope="module")
def captured():
    return capture(tiny_deepseek_v3())


def logits(captured, ids: torch.Tensor, **settings) -> tuple[torch.Tensor, set[torch.dtype]]:
    engine, _ = compile_graph(captured, dcp_compile.DCPConfig(**SMALL, **settings), ParallelLayout())
    with engine.open(1, len(ids)) as session:
        out = session.prefill([ids])
    return out, {tensor.dtype for ref, tensor in engine.states.items() if ref.kind == "kv_cache"}


def test_a_16_bit_cache_rounds_latents_and_nothing_else(captured):
    ids = torch.randint(3, 100, (21,), generator=torch.Generator().manual_seed(2))
    exact, kept = logits(captured, ids)
    rounded, stored = logits(captured, ids, kv_cache_dtype="bfloat16")
    assert (kept, stored) == ({torch.float32}, {torch.bfloat16})
    error = float((rounded - exact).norm() / exact.norm())
    assert 1e-6 < error < 3e-2, error


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kv_cache_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"cuda_graphs": True}, "cuda_graphs=True"),
    ],
)
def test_settings_without_machinery_are_refused(captured, settings, named):
    with pytest.raises(ConfigError, match=named):
        compile_graph(captured, dcp_compile.DCPConfig(**SMALL, **settings), ParallelLayout())
