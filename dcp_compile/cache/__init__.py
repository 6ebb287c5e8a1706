# SPDX-License-Identifier: Apache-2.0
"""Who holds which page of the KV cache and which state slot."""

from .pages import PagePool, SlotPool

__all__ = ["PagePool", "SlotPool"]
