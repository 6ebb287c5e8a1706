# SPDX-License-Identifier: Apache-2.0
"""Attention backends: what they can do, and which one serves a model."""

from .contract import AttentionBackend, AttentionRequirements, BackendCapabilities, rejections
from .hopper import HopperBackend
from .reference import TorchBackend
from .registry import BackendChoice, get_backend, register_backend, select_backend
from .triton_backend import TritonBackend

# Order of preference: the reference comes last.
register_backend(HopperBackend())
register_backend(TritonBackend())
register_backend(TorchBackend())

__all__ = [
    "AttentionBackend",
    "AttentionRequirements",
    "BackendCapabilities",
    "BackendChoice",
    "get_backend",
    "register_backend",
    "rejections",
    "select_backend",
]
