# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from tests.generation.helpers import Pair, tiny_qwen3
from tests.tiny_models import tiny_kimi_linear


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def kimi() -> Pair:
    """A hybrid model: its recurrent layer cannot be rolled back by cropping."""
    return Pair.of(lambda seed=0: tiny_kimi_linear(2, seed=seed, num_local_experts=4))


@pytest.fixture(scope="session")
def qwen() -> Pair:
    """A model of softmax attention only."""
    return Pair.of(tiny_qwen3)


@pytest.fixture(params=["qwen", "kimi"])
def pair(request) -> Pair:
    return request.getfixturevalue(request.param)
