# SPDX-License-Identifier: Apache-2.0
"""Hugging Face generate() on a compiled model: validation, decoding loops, drafts and their acceptance."""
