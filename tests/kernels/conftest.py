# SPDX-License-Identifier: Apache-2.0
"""Kernel tests run on a GPU when there is one, else in Triton's interpreter, which tests/conftest.py switches on."""

from __future__ import annotations

import os
import random
import uuid

import pytest
import torch

if not torch.cuda.is_available():
    import tests.kernels.interpreter  # noqa: F401

# New for each run, the same in all workers of a distributed run.
_RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that asks for ``seed`` fresh seeds: ``@pytest.mark.seeds(n)`` of them; DCP_SEED fixes the seed."""
    if "seed" not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker("seeds")
    count = mark.args[0] if mark else 8
    fixed = os.environ.get("DCP_SEED")
    source = random.Random(f"{_RUN} {metafunc.definition.nodeid}")
    metafunc.parametrize("seed", [int(fixed)] if fixed else [source.randrange(2**31) for _ in range(count)])


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def draw(seed: int) -> random.Random:
    """Random choices of one test; torch is seeded alike."""
    torch.manual_seed(seed)
    return random.Random(seed)


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(float("nan") if tensor.is_floating_point() else -77)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything a launcher allocates starts as NaN, or -77 for integers: what a kernel forgets to write shows."""
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: _poison(new_empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: _poison(empty_like(*args, **kwargs)))
