# SPDX-License-Identifier: Apache-2.0
"""Attention backends: what they can do, and which one serves a request."""
