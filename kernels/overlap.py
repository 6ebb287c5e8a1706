# SPDX-License-Identifier: Apache-2.0
"""Launching a kernel while the one before it ends: programmatic dependent launch, from Hopper on.

The launch is over when the last program before it ends, instead of beginning then. Nothing a kernel does before
:func:`wait_for_previous` may depend on earlier kernels or disturb them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from . import device


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Go on when the kernels before have ended and what they wrote can be read."""
    if OVERLAP:
        gdc_wait()


def overlapping(place: torch.device) -> dict[str, bool]:
    """Launch options, ``OVERLAP`` among them, on ``place``."""
    return {"OVERLAP": True, "launch_pdl": True} if device.starts_early(place) else {"OVERLAP": False}
