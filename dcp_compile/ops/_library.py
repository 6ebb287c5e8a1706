# SPDX-License-Identifier: Apache-2.0
"""The ``dcp`` operator namespace and the three ways an operator is registered."""

from __future__ import annotations

from collections.abc import Callable

import torch

LIBRARY = torch.library.Library("dcp", "DEF")


def define(schema: str) -> None:
    """Declare an operator of the ``dcp`` namespace."""
    LIBRARY.define(schema)


def reference(name: str) -> Callable[[Callable], Callable]:
    """Register the decorated function as the implementation on every device that has no kernel of its own.

    It is the specification of the operator: kernels are tested against it.
    """

    def register(function: Callable) -> Callable:
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        return function

    return register


def kernel(name: str, function: Callable) -> None:
    """Register ``function`` as the CUDA implementation of an operator."""
    LIBRARY.impl(name, function, "CUDA")


def fake(name: str) -> Callable[[Callable], Callable]:
    """Register the decorated function as the shape rule of an operator."""
    return torch.library.register_fake(f"dcp::{name}", lib=LIBRARY)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type in which a reference accumulates: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
