# SPDX-License-Identifier: Apache-2.0
"""Running the scripts of this folder as processes of their own that cannot outlive a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_scenarios(*names: str) -> dict[str, list]:
    """What every rank of the named scenarios reports (see scenarios.py), by scenario."""
    return run_script("tests.distributed.scenarios", *names)


def run_script(module: str, *arguments: str, request: Any = None, timeout: float = 400.0) -> Any:
    """The JSON that ``python -m module arguments`` prints, ``request`` being its input.

    Raises:
        AssertionError: it failed, or was not done in time; it and all its ranks are gone then.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        output, errors = process.communicate(json.dumps(request), timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, errors = process.communicate()
        raise AssertionError(f"{module} was not done after {timeout} s:\n{errors}") from None
    assert process.returncode == 0, f"{module} failed:\n{errors}"
    return json.loads(output)
