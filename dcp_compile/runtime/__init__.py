# SPDX-License-Identifier: Apache-2.0
"""Running compiled steps: the engine owns programs and state, a session is one generation on it."""

from .engine import Engine
from .session import Session

__all__ = ["Engine", "Session"]
