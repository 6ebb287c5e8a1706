# SPDX-License-Identifier: Apache-2.0
"""The ``dcp`` operators. Importing this package registers them: schema, shape rule and reference implementation."""

import torch

from . import conv, exchange, heads, kda, kv_write, markers, merge, metadata, mla

if torch.cuda.is_available():
    from . import cuda  # noqa: F401

__all__ = ["conv", "exchange", "heads", "kda", "kv_write", "markers", "merge", "metadata", "mla"]
