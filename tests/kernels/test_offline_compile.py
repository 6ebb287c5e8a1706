# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for Hopper, without a GPU, within the registers and the shared memory of one program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from dcp_compile.kernels.device import GLUON_VERSION

HERE = Path(__file__).parent
SHARED_LIMIT = 232448
# Bytes of spilled registers per thread that the largest tiles of the portable attention kernel are known to have.
PORTABLE_SPILLS = {
    "rows, one": 64, "rows, verify": 64, "rows, float16": 64, "prefix": 64, "rows, small pages": 160, "tail, window": 64,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(
    not triton.__version__.startswith(GLUON_VERSION + "."),
    reason=f"register counts are those of triton {GLUON_VERSION}",
)
def test_resources() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(HERE.parents[1])}
    output = subprocess.run(
        [sys.executable, HERE / "offline_compile.py"], env=environment, capture_output=True, text=True, timeout=900
    )
    assert output.returncode == 0, output.stderr[-4000:]
    from dcp_compile.kernels.named_barrier import FIRST  # needs the Gluon of that version

    report = json.loads(output.stdout)
    assert {entry["kernel"] for entry in report} == {
        "_mla_hopper", "_mla", "_tail", "_merge", "_merge_pieces", "_kda", "_kda_verify", "_kda_verify_hopper", "_prepare",
        "_conv_window", "_step_metadata",
        "_kv_write", "_gather_heads", "_merge_ranks",
    }  # fmt: skip
    for entry in report:
        allowed = PORTABLE_SPILLS.get(entry["case"], 0) if entry["kernel"] == "_mla" else 0
        assert entry["stack"] <= allowed, entry
        assert entry["shared"] <= SHARED_LIMIT, entry
        assert entry["ordered"] is (True if entry["kernel"] == "_mla_hopper" else None), entry
        assert (entry["barriers"] or [0])[-1] < FIRST.value, entry
        assert entry["kernel"] != "_mla_hopper" or entry["barriers"][:2] == [0, 1], entry
