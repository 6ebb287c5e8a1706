# SPDX-License-Identifier: Apache-2.0
"""The ``dcp`` operators. Importing this package registers them: schema, shape rule and reference implementation."""

from . import conv, kda, kv_write, markers, merge, metadata, mla

__all__ = ["conv", "kda", "kv_write", "markers", "merge", "metadata", "mla"]
