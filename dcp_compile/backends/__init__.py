# SPDX-License-Identifier: Apache-2.0
"""Attention backends: what they can do, and which one serves a model."""

from .contract import AttentionBackend, AttentionRequirements, BackendCapabilities, rejections
from .reference import TorchBackend
from .registry import BackendChoice, get_backend, register_backend, select_backend

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
