# SPDX-License-Identifier: Apache-2.0
"""Exchanges through mailboxes on forked ranks, against the same exchanges through gloo.

As a script: ``python -m tests.kernels.peers`` reads ``{"size", "seed", "calls"}`` and prints, per rank, the largest error,
as JSON. The mailboxes lie in memory that the ranks share.
"""

from __future__ import annotations

import json
import random
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor

from dcp_compile.kernels.mailbox import CHANNELS, Mailbox, mailbox_bytes, view
from dcp_compile.kernels.peer_gather import gather_heads
from dcp_compile.kernels.peer_merge import merge_ranks
from dcp_compile.ops import exchange as reference
from tests.distributed.ranks import run_ranks

if not torch.cuda.is_available():
    import tests.kernels.interpreter  # noqa: F401

WIDTH, LATENT, UNITS = 24, 20, 300
_POLLS = 10**9


def shared_mailboxes(size: int, unit_bytes: int) -> Tensor:
    """Mailboxes of ``size`` ranks, full of garbage but for the flags, in memory that forked processes share."""
    memory = torch.full((size, mailbox_bytes(size, UNITS, unit_bytes)), 255, dtype=torch.uint8).share_memory_()
    memory[:, : size * CHANNELS * 8] = 0
    return memory


def exchange(boxes: dict[str, Tensor], seed: int, calls: int) -> float:
    """Largest difference over ``calls`` exchanges of random shapes, this rank being late at random."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    same, own = random.Random(seed), random.Random(f"{seed} {rank}")
    generator = torch.Generator().manual_seed(own.randrange(2**31))
    boxes = {name: _view(memory, rank) for name, memory in boxes.items()}
    worst = 0.0
    for _ in range(calls):
        rows, heads, sharded = same.choice([0, 1, 2, 5, 17]), same.choice([1, 3]), same.random() < 0.6
        dtype = same.choice([torch.float32, torch.float16])
        if own.random() < 0.5:
            time.sleep(own.random() * 0.02)
        if sharded:
            query = torch.randn(heads, rows, WIDTH, generator=generator).to(dtype).transpose(0, 1)
            got, want = gather_heads(query, boxes["gather"]), reference.gather_heads(query, size, group)
            worst = max(worst, _difference(got, want))
        all_heads = heads * size if sharded else heads
        out = torch.randn(rows, LATENT, all_heads, generator=generator).to(dtype).transpose(1, 2)
        lse = torch.randn(rows, all_heads, generator=generator) * 4
        empty = torch.rand(rows, all_heads, generator=generator) < own.choice([0, 0.5, 1])
        lse[empty], out[empty] = own.choice([-torch.inf, torch.nan, torch.inf]), torch.nan
        got = merge_ranks(out, lse, heads, boxes["merge"])
        want = reference.merge_ranks(out, lse, heads, size, group)
        worst = max(worst, _difference(got, want))
    assert all(not box.lost.any() for box in boxes.values())
    return worst


def _view(memory: Tensor, rank: int) -> Mailbox:
    addresses = torch.tensor([part.data_ptr() for part in memory], dtype=torch.int64)
    return view(addresses, rank, UNITS, WIDTH * 4, _POLLS)


def _difference(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape and got.dtype == want.dtype and got.isfinite().all()
    scale = 1.0 if got.dtype == torch.float32 else 1e-3
    return ((got - want).abs().amax().item() * scale) if got.numel() else 0.0


def main() -> None:
    request = json.load(sys.stdin)
    boxes = {name: shared_mailboxes(request["size"], WIDTH * 4) for name in ("gather", "merge")}
    json.dump(run_ranks(request["size"], exchange, boxes, request["seed"], request["calls"], timeout=200.0), sys.stdout)


if __name__ == "__main__":
    main()
