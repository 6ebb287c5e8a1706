# SPDX-License-Identifier: Apache-2.0
import pytest
import torch


@pytest.fixture
def seed():
    """A fresh seed, printed with a failure so that it can be repeated."""
    value = torch.Generator().seed() % 2**31
    print(f"seed {value}")
    return value
