# SPDX-License-Identifier: Apache-2.0
"""Process groups, agreement between ranks, and models of which each rank holds a part."""

from .groups import ParallelLayout, parallel_layout

__all__ = ["ParallelLayout", "parallel_layout"]
