# SPDX-License-Identifier: Apache-2.0
"""A program under torchrun: optimize() makes the groups itself, and generate() gives the same on every rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.distributed.scripts import ROOT


def test_two_ranks_generate_the_same(tmp_path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.distributed.program", str(tmp_path)],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, report in enumerate(reports):
        assert report["same"] == [True, True]
        assert f"dcp 2 (this is {rank})" in report["text"]
    assert reports[0]["sampled"] == reports[1]["sampled"]
