# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a DCP group exchange per attention layer, each as one operator.

The references use the collectives of the group's backend. On CUDA, ranks that can write one another's memory use the
kernels in ``kernels/peer_gather.py`` and ``kernels/peer_merge.py`` (see :mod:`dcp_compile.parallel.peers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._library import define, fake, reference
from .merge import pack_partials

if TYPE_CHECKING:
    from ..kernels.mailbox import Mailbox  # needs Triton

NAMES = ("gather_heads", "merge_ranks")


@dataclass(frozen=True)
class Mailboxes:
    """What a group of ranks that write one another's memory uses."""

    gather: Mailbox
    merge: Mailbox


MAILBOXES: dict[str, Mailboxes] = {}
"""By name of the group; filled by :func:`dcp_compile.parallel.peers.open_exchange`."""

define("gather_heads(Tensor query, int size, str group) -> Tensor")
define("merge_ranks(Tensor out, Tensor lse, int heads, int size, str group) -> Tensor")

c10d = torch.ops._c10d_functional


@reference("gather_heads")
def gather_heads(query: Tensor, size: int, group: str) -> Tensor:
    """Queries of all ranks' heads in rank order: ``[T, h, E]`` of each rank into ``[T, size * h, E]`` on every rank."""
    gathered = c10d.all_gather_into_tensor(query.transpose(0, 1).contiguous(), size, group)
    return c10d.wait_tensor(gathered).transpose(0, 1).contiguous()


@reference("merge_ranks")
def merge_ranks(out: Tensor, lse: Tensor, heads: int, size: int, group: str) -> Tensor:
    """Merge the partials of all ranks: ``out [T, H, R]``, ``lse [T, H]`` (natural) into ``[T, heads, R]``.

    With heads = H every rank merges all heads; with heads = H / size, rank r merges those from r * heads on.
    """
    rows, all_heads, latent = out.shape
    packed = pack_partials(out, lse)
    if heads == all_heads:
        received = c10d.all_gather_into_tensor(packed, size, group)
    else:
        parts = packed.unflatten(1, (size, heads)).transpose(0, 1).flatten(0, 1).contiguous()
        received = c10d.all_to_all_single(parts, [rows] * size, [rows] * size, group)
    received = c10d.wait_tensor(received).view(size, rows, heads, packed.shape[2])
    return torch.ops.dcp.merge_packed(received, latent)


@fake("gather_heads")
def _(query, size, group):
    return query.new_empty(query.shape[0], size * query.shape[1], query.shape[2])


@fake("merge_ranks")
def _(out, lse, heads, size, group):
    return out.new_empty(out.shape[0], heads, out.shape[2])
