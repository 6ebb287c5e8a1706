# SPDX-License-Identifier: Apache-2.0
"""Attention backends: what they can do, and which one serves a model."""

from .contract import (
    AttentionBackend,
    AttentionRequirements,
    BackendCapabilities,
    PlanningBackend,
    PrefixPlan,
    plans_prefixes,
    rejections,
)
from .flashinfer_backend import FlashInferBackend
from .flashinfer_blackwell import FlashInferBlackwellBackend
from .hopper import HopperBackend
from .reference import TorchBackend
from .registry import BackendChoice, get_backend, register_backend, select_backend
from .tokenspeed import TokenSpeedBackend
from .triton_backend import TritonBackend

# Order of preference: the reference comes last, and what has run on no GPU yet after what has.
register_backend(HopperBackend())
register_backend(FlashInferBackend())
register_backend(TritonBackend())
register_backend(FlashInferBlackwellBackend())
register_backend(TokenSpeedBackend())
register_backend(TorchBackend())

__all__ = [
    "AttentionBackend",
    "AttentionRequirements",
    "BackendCapabilities",
    "BackendChoice",
    "FlashInferBackend",
    "PlanningBackend",
    "PrefixPlan",
    "get_backend",
    "plans_prefixes",
    "register_backend",
    "rejections",
    "select_backend",
]
