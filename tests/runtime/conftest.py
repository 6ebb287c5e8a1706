# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import secrets

import pytest


@pytest.fixture
def fresh_seed(record_property) -> int:
    """A new seed in every run, printed with a failing test."""
    seed = secrets.randbelow(2**31)
    record_property("seed", seed)
    print(f"seed {seed}")
    return seed
