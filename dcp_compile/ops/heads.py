# SPDX-License-Identifier: Apache-2.0
"""Where a model that makes the queries of several ranks goes on with the heads of this rank."""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import define, fake, reference

define("own_heads(Tensor out, Tensor part, int parts) -> Tensor")


@reference("own_heads")
def own_heads(out: Tensor, part: Tensor, parts: int) -> Tensor:
    """Run number ``part`` (int64 scalar) of ``parts`` runs of heads: ``[B, S, H, D]`` -> ``[B, S, H / parts, D]``.

    In a rewritten graph it is gone: there attention merges these heads only (see ``passes/shard_dcp.py``).
    """
    heads = out.shape[2] // parts
    return out.index_select(2, part * heads + torch.arange(heads, device=out.device))


@fake("own_heads")
def _(out, part, parts):
    return out.new_empty(*out.shape[:2], out.shape[2] // parts, out.shape[3])
