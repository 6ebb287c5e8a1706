# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from tests.runtime.conftest import fresh_seed

__all__ = ["fresh_seed"]
