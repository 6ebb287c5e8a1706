# SPDX-License-Identifier: Apache-2.0
"""What launchers ask of a device. Read once per process and device: nothing here waits for the GPU."""

from __future__ import annotations

import torch
import triton

GLUON_VERSION = "3.6"  # the language is experimental: other versions change it, and what its compiler makes of a kernel


def multiprocessors(device: torch.device) -> int:
    """Programs that run at once with one program per multiprocessor; 1 without a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory one program may use; without a GPU, the smallest of current GPUs."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 101376


def gluon_unavailable() -> str | None:
    """Why kernels in Gluon cannot be compiled, or None."""
    if triton.__version__.startswith(GLUON_VERSION + "."):
        return None
    return f"triton {triton.__version__} is not {GLUON_VERSION}, whose Gluon the kernel is written in"


def hopper_unavailable(device: torch.device) -> str | None:
    """Why :mod:`dcp_compile.kernels.mla_hopper` cannot run on ``device``, or None. It imports on every machine."""
    if device.type != "cuda":
        return f"device {device} is not a CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"compute capability {capability[0]}.{capability[1]} is not 9.0"
    return gluon_unavailable()
