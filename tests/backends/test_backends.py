# SPDX-License-Identifier: Apache-2.0
"""The backends that come with the package: order, and what they refuse on this machine."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dcp_compile.backends import get_backend, registry, rejections, select_backend
from dcp_compile.errors import BackendError
from dcp_compile.ops import mla
from tests.backends.capabilities import NEED

ON_CPU = dataclasses.replace(
    NEED,
    device_type="cpu",
    compute_capability=None,
    query_dtype=torch.float32,
    kv_dtype=torch.float32,
    cuda_graphs=False,
)


def test_the_reference_comes_last_and_runs_everywhere() -> None:
    assert list(registry._BACKENDS)[-1] == "torch"
    choice = select_backend(ON_CPU)
    assert choice.name == "torch"
    assert set(choice.rejected) == set(registry._BACKENDS) - {"torch"}
    assert all("device type cpu not supported (supported: cuda)" in reasons for reasons in choice.rejected.values())


def test_the_reference_is_the_operators_specification() -> None:
    torch_backend = get_backend("torch")
    assert torch_backend.unavailable() is None
    assert torch_backend.attend_rows is mla.attend_rows
    assert torch_backend.attend_prefix is mla.attend_prefix
    assert torch_backend.attend_tail is mla.attend_tail


def test_the_reference_cannot_be_captured() -> None:
    """It reads lengths on the host: a replay would keep those of the capture."""
    assert rejections(get_backend("torch").capabilities, NEED) == [
        "reads lengths on the host and has no plan call: a CUDA graph would replay those of its capture"
    ]


@pytest.mark.parametrize("name", sorted(set(registry._BACKENDS) - {"torch"}))
def test_a_gpu_backend_is_refused_on_a_cpu_even_by_name(name: str) -> None:
    with pytest.raises(BackendError, match=f"{name}: .*device type cpu not supported"):
        select_backend(ON_CPU, name)


def test_a_float8_cache_goes_to_triton_on_a_gpu() -> None:
    need = dataclasses.replace(NEED, latent=512, rope=64, page_size=64, layout="auto", kv_dtype=torch.float8_e4m3fn)
    for capability in ((9, 0), (10, 0)):
        able = [
            name for name, backend in registry._BACKENDS.items()
            if not rejections(backend.capabilities, dataclasses.replace(need, compute_capability=capability), True)
        ]  # fmt: skip
        assert able == ["triton", "torch"]
    for name in set(registry._BACKENDS) - {"triton", "torch"}:
        reasons = rejections(get_backend(name).capabilities, need, True)
        assert any(reason.startswith("kv cache dtype torch.float8_e4m3fn not supported") for reason in reasons)


@pytest.mark.parametrize("name", registry._BACKENDS)
def test_every_backend_reports_what_is_missing_without_raising(name: str) -> None:
    missing = get_backend(name).unavailable()
    assert missing is None or (isinstance(missing, str) and missing)
