# SPDX-License-Identifier: Apache-2.0
"""Sharding attention heads over tensor-parallel ranks, in a model that was loaded whole.

A model's class says which parameters are grouped by head (``head_sharding``: parameter-name suffix -> dim). Every rank
keeps its slice; the output projection of a sharded layer then gives a partial sum, which is added up over the ranks.
The traced graph sees shorter tensors and one all-reduce per layer, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from .._compat import functional_collectives
from ..errors import UnsupportedModelError
from .groups import ParallelLayout

# Projections of models that do not declare a table themselves: transformers' MLA and delta-rule attention.
TRANSFORMERS_HEAD_SHARDING: dict[str, int] = {
    "self_attn.q_proj.weight": 0,
    "self_attn.q_b_proj.weight": 0,
    "self_attn.kv_b_proj.weight": 0,
    "self_attn.o_proj.weight": 1,
}


@dataclass(frozen=True)
class ShardedHeads:
    """What was changed, so that it can be put back."""

    parameters: list[tuple[nn.Module, str, Tensor]]
    projections: list[nn.Module]

    def restore(self) -> None:
        """Give every parameter its full value again and remove the all-reduces."""
        for module, name, full in self.parameters:
            getattr(module, name).data = full
        for projection in self.projections:
            del projection.forward


def shard_heads(model: nn.Module, parallel: ParallelLayout) -> ShardedHeads:
    """Keep this rank's heads of every attention layer.

    Raises:
        UnsupportedModelError: the model names no parameters to split, or its heads do not divide over the ranks. Nothing
            is changed then.
    """
    heads = model.config.get_text_config().num_attention_heads
    if heads % parallel.tp_size:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {heads} attention heads, which do not divide over tp_size={parallel.tp_size} ranks; "
            "choose a divisor, or tp_size=1 (replicated heads) with dcp_size > 1"
        )
    table = getattr(model, "head_sharding", None) or TRANSFORMERS_HEAD_SHARDING
    planned = []
    for path, parameter in model.named_parameters():
        dim = next((dim for suffix, dim in table.items() if path.endswith(suffix)), None)
        if dim is None:
            continue
        if parameter.shape[dim] % parallel.tp_size:
            raise UnsupportedModelError(
                f"{path}: dim {dim} of {tuple(parameter.shape)} does not divide over tp_size={parallel.tp_size} ranks"
            )
        planned.append((path, parameter, dim))
    _check_supported(model, [path for path, _, _ in planned])
    changed, projections = [], []
    for path, parameter, dim in planned:
        owner, name = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        changed.append((owner, name, parameter.data))
        size = parameter.shape[dim] // parallel.tp_size
        parameter.data = parameter.data.narrow(dim, parallel.tp_rank * size, size).contiguous()
        if dim == 1:
            owner.forward = _summed(owner.forward, parallel.tp_group)
            projections.append(owner)
    return ShardedHeads(changed, projections)


def _check_supported(model: nn.Module, paths: list[str]) -> None:
    attention = {path.rpartition(".self_attn.")[0] for path, _ in model.named_parameters() if ".self_attn." in path}
    covered = {path.rpartition(".self_attn.")[0] for path in paths if path.endswith("o_proj.weight")}
    recurrent_without_table = any(hasattr(module, "conv1d") for module in model.modules()) and not hasattr(
        model, "head_sharding"
    )
    if attention - covered or recurrent_without_table:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be sharded by heads with tp_size > 1: its class declares no head_sharding table "
            "for all of its attention layers; use tp_size=1 (replicated heads) with dcp_size > 1"
        )


def _summed(forward: Callable[[Tensor], Tensor], group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        return functional_collectives.all_reduce(forward(x), "sum", group)

    return run


