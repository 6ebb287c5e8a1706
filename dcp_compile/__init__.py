# SPDX-License-Identifier: Apache-2.0
"""dcp_compile: decode context parallelism and speculative decoding for Hugging Face MLA models, as a compiler."""

from . import ops  # noqa: F401  (registers the operators)
from .api import optimize, unoptimize
from .config import DCPConfig
from .errors import (
    BackendError,
    CapacityError,
    CaptureError,
    CheckpointError,
    ConfigError,
    DCPCompileError,
    GenerationError,
    InvariantError,
    MatchError,
    RankError,
    UnsupportedModelError,
)
from .generation.api import generate
from .report import explain

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "CapacityError",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "DCPCompileError",
    "DCPConfig",
    "GenerationError",
    "InvariantError",
    "MatchError",
    "RankError",
    "UnsupportedModelError",
    "explain",
    "generate",
    "optimize",
    "unoptimize",
]
