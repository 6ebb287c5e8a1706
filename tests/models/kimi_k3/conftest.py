# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def seed():
    """A fresh seed, printed with a failure so that it can be repeated."""
    value = torch.Generator().seed() % 2**31
    print(f"seed {value}")
    return value


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
