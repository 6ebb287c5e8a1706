# SPDX-License-Identifier: Apache-2.0
"""FX passes: one transform per file, run in the order that pipeline.PASSES lists."""

from .context import PassContext, PassResult
from .pipeline import PASSES, run_passes

__all__ = ["PASSES", "PassContext", "PassResult", "run_passes"]
