# SPDX-License-Identifier: Apache-2.0
"""Settings that reach the compiled model: the cache's element type and scale, and refusal of what does not exist."""

from __future__ import annotations

import pytest
import torch

import dcp_compile
from benchmarks.fp8_cache import logits_along
from dcp_compile.capture import capture
from dcp_compile.compiler import _check_available, compile_graph
from dcp_compile.errors import ConfigError
from dcp_compile.parallel import ParallelLayout
from tests.tiny_models import tiny_deepseek_v3

SMALL = {"block_size": 4, "max_batch_size": 2, "max_seq_len": 64, "num_speculative_tokens": 0}


@pytest.fixture(scope="module")
def captured():
    return capture(tiny_deepseek_v3(first_k_dense_replace=9))  # dense: rounding must not choose other experts


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


def along(captured, ids: torch.Tensor, **settings) -> torch.Tensor:
    """Logits of a prefill in chunks of 6, and of verify steps of 4 rows."""
    config = dcp_compile.DCPConfig(**{**SMALL, "num_speculative_tokens": 3, "prefill_chunk": 6, **settings})
    engine, report = compile_graph(captured, config, ParallelLayout())
    wanted = torch.float32 if config.kv_cache_dtype == "auto" else torch.float8_e4m3fn
    assert {tensor.dtype for ref, tensor in engine.states.items() if ref.kind == "kv_cache"} == {wanted}
    assert report.requirements.kv_dtype == wanted
    return logits_along(engine, ids, 21, rows=4)


FLOAT8 = {"kv_cache_dtype": "float8_e4m3fn"}


@pytest.mark.parametrize("scale", [1.0, 0.02, 3])
def test_a_float8_cache_rounds_latents_and_nothing_else(captured, scale):
    """2.6 % of rounding per element, which averages out; how rows are cut into steps and calls makes no difference."""
    ids = torch.randint(3, 100, (35,), generator=torch.Generator().manual_seed(3))
    exact = along(captured, ids)
    settings = {**FLOAT8, "kv_cache_scale": scale}
    split, flattened, chunked = (
        along(captured, ids, **settings, **how)
        for how in ({"decode_layout": "split"}, {"decode_layout": "flattened"}, {"prefill_chunk": 21, "block_size": 8})
    )

    def error(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one - other).norm() / other.norm())

    assert 1e-3 < error(split, exact) < 5e-2
    for other in (flattened, chunked):  # rounding in float32 may tip a latent over to the next float8
        assert error(other, split) < 0.1 * error(split, exact)


def test_values_out_of_range_saturate(captured):
    """A scale so small that all latents do: a useless cache, but no NaN."""
    ids = torch.randint(3, 100, (25,), generator=torch.Generator().manual_seed(4))
    assert along(captured, ids, **FLOAT8, kv_cache_scale=1e-6).isfinite().all()


def test_a_float8_cache_needs_a_gpu_that_converts_to_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    config = dcp_compile.DCPConfig(**FLOAT8)
    with pytest.raises(ConfigError, match=r"float8_e4m3fn\" on compute capability \(8, 6\).*\(8, 9\).*bfloat16"):
        _check_available(config, torch.device("cuda"))
    _check_available(config, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU for kernels and graphs on a float8 cache")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_and_graphs_give_what_the_reference_gives(dtype):
    """The triton backend under Inductor and CUDA graphs against the torch backend, both on a float8 cache."""
    step = capture(tiny_deepseek_v3(dtype=dtype, first_k_dense_replace=9).cuda())
    ids = torch.randint(3, 100, (35,))
    settings = {**FLOAT8, "kv_cache_scale": 0.7, "block_size": 16}
    plain = {"backend": "torch", "lowering": "eager", "cuda_graphs": False}
    for layout in ("split", "flattened"):
        wanted = along(step, ids, **settings, **plain, decode_layout=layout)
        found = along(step, ids, **settings, backend="triton", decode_layout=layout)
        assert float((found - wanted).norm() / wanted.norm()) < (1e-2 if dtype == torch.float32 else 5e-2)


def test_settings_without_machinery_are_refused(captured):
    with pytest.raises(ConfigError, match="cuda_graphs=True"):
        compile_graph(captured, dcp_compile.DCPConfig(**SMALL, cuda_graphs=True), ParallelLayout())
