# SPDX-License-Identifier: Apache-2.0
"""Making sure that all ranks of a replica are about to do the same thing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import RankError
from .groups import ParallelLayout


def check_agreement(parallel: ParallelLayout, facts: Mapping[str, object]) -> None:
    """Compare ``facts`` over the ranks of the replica.

    Raises:
        RankError: on every rank, naming the ranks and the field that differ.
    """
    if parallel.replica is None:
        return
    size = dist.get_world_size(parallel.replica)
    gathered: list[Mapping[str, object]] = [{}] * size
    dist.all_gather_object(gathered, dict(facts), group=parallel.replica)
    for name, wanted in gathered[0].items():
        odd = [rank for rank in range(size) if gathered[rank].get(name) != wanted]
        if odd:
            found = gathered[odd[0]].get(name)
            raise RankError(
                f"rank {', '.join(map(str, odd))} disagrees with rank 0 on {name}: {found!r} instead of {wanted!r}; all "
                "ranks must load the same checkpoint and pass the same settings and inputs"
            )


def weights_fingerprint(model: nn.Module) -> str:
    """A short digest of names, shapes and samples of every parameter: it reads 64 values of each, not all of them."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        step = max(1, flat.numel() // 64)
        samples = flat[::step].to(torch.float64).cpu().numpy().tobytes()
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode() + samples)
    return digest.hexdigest()[:16]


def prompts_fingerprint(prompts: Sequence[Tensor]) -> dict[str, object]:
    """What ranks compare of their prompts, one int64 ``[length]`` per request: the lengths and a digest of the ids."""
    digest = hashlib.sha256(b"".join(prompt.cpu().numpy().tobytes() for prompt in prompts))
    return {"prompt lengths": [len(prompt) for prompt in prompts], "prompt ids": digest.hexdigest()[:16]}
