# SPDX-License-Identifier: Apache-2.0
"""Captured models, once per run: a test gets a copy of the graph to rewrite."""

from __future__ import annotations

import pytest

from tests.passes.models import HYBRID, MODELS, Captured, captured_model


@pytest.fixture(scope="session", params=MODELS)
def captured(request: pytest.FixtureRequest) -> Captured:
    return captured_model(request.param)


@pytest.fixture(scope="session")
def deepseek() -> Captured:
    return captured_model("deepseek")


@pytest.fixture(scope="session", params=HYBRID)
def hybrid(request: pytest.FixtureRequest) -> Captured:
    return captured_model(request.param)
