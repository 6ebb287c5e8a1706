# SPDX-License-Identifier: Apache-2.0
"""What each rank of a tensor-parallel group holds of a model, as tables of parameter and module names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, UnsupportedModelError
from .parts import sum_output

if TYPE_CHECKING:
    from .shard import ModelShard

Region = tuple[slice, ...]


@dataclass(frozen=True)
class Split:
    """How one parameter is dealt to the ranks: rank r gets the r-th of ``tp_size`` equal runs along a dim.

    Attributes:
        dim: the dim that is split. parts: tensors stacked along it, each of which is split by itself; 1 for dim 0.
        groups: setting of the model's config that counts what must stay together along the dim, such as heads; None:
            every index may go to another rank.
        sharers: consecutive ranks that hold the same, their parts together.
    """

    dim: int = 0
    parts: int = 1
    groups: str | None = None
    sharers: int = 1

    def regions(self, shape: Sequence[int], rank: int, size: int) -> list[Region]:
        """What rank ``rank`` of ``size`` holds of a tensor of this shape, to be concatenated along the dim."""
        part = shape[self.dim] // self.parts
        own = part // (size // self.sharers)
        starts = [index * part + rank // self.sharers * own for index in range(self.parts)]
        return [(slice(None),) * self.dim + (slice(start, start + own),) for start in starts]

    def cut(self, entry: Any, shape: Sequence[int], rank: int, size: int) -> Tensor:
        """The rank's part of ``entry``, a tensor of this shape or whatever is read where it is indexed by slices."""
        regions = self.regions(shape, rank, size)
        if self.parts == 1:
            return entry[regions[0]].contiguous()
        # One index of the first dim after the other: a second copy of experts may be too large to hold.
        own = [*shape[: self.dim], shape[self.dim] // (size // self.sharers), *shape[self.dim + 1 :]]
        some = entry[(slice(0, 0),)]
        out = torch.empty(own, dtype=some.dtype, device=some.device)
        for index in range(shape[0]):
            row = (slice(index, index + 1),)
            out[row] = torch.cat([entry[row + region[1:]] for region in regions], self.dim)
        return out


@dataclass(frozen=True)
class ShardingPlan:
    """The table of a model class, which offers it as ``sharding_plan``.

    Attributes:
        splits: parameter name, or the end of it from a dot on -> its split. Other parameters are whole on every rank.
        exchanges: module name, or the end of it -> what completes its output over the ranks.
        queries: of the splits, those of the weights that queries are made and keys are absorbed with; none: they cannot
            be shared.
        expert_parallel: the plan in which every rank holds some experts whole instead of a slice of each; None: the
            model has no experts to deal.
    """

    splits: Mapping[str, Split]
    exchanges: Mapping[str, Callable[[ModelShard, nn.Module], None]]
    queries: frozenset[str] = frozenset()
    expert_parallel: ShardingPlan | None = None

    def sharing_queries(self, ranks: int) -> ShardingPlan:
        """The plan by which each of ``ranks`` consecutive ranks makes the queries of all of them."""
        shared = {name: replace(self.splits[name], sharers=ranks) for name in self.queries}
        return replace(self, splits={**self.splits, **shared})


# Attention heads of models that have no plan of their own: transformers' MLA.
TRANSFORMERS_HEADS = ShardingPlan(
    splits={
        "self_attn.q_proj.weight": Split(0, groups="num_attention_heads"),
        "self_attn.q_b_proj.weight": Split(0, groups="num_attention_heads"),
        "self_attn.kv_b_proj.weight": Split(0, groups="num_attention_heads"),
        "self_attn.o_proj.weight": Split(1, groups="num_attention_heads"),
    },
    exchanges={"self_attn.o_proj": sum_output},
)


def find_plan(model: nn.Module, expert_parallel: bool, query_ranks: int) -> ShardingPlan:
    """The plan of a model's class, or the one for the attention heads of transformers' models.

    Args:
        query_ranks: consecutive ranks of which each makes the queries of all.

    Raises:
        UnsupportedModelError: neither covers the model, it has no experts to deal, or its queries cannot be shared.
    """
    plan = getattr(type(model), "sharding_plan", None)
    if plan is None:
        _check_attention_only(model)
        plan = TRANSFORMERS_HEADS
    if expert_parallel and plan.expert_parallel is None:
        raise UnsupportedModelError(
            f"expert_parallel=True, but {type(model).__name__} has no experts that its plan could deal to the ranks; "
            "leave it False"
        )
    plan = plan.expert_parallel if expert_parallel else plan
    if query_ranks > 1 and not plan.queries:
        raise UnsupportedModelError(
            f'query_projection="replicated", but the plan for {type(model).__name__} does not say what queries are '
            'made with; leave it "sharded"'
        )
    return plan.sharing_queries(query_ranks)


def named(table: Mapping[str, Any], path: str) -> Any | None:
    """The table's entry for a parameter or module path."""
    return next((entry for name, entry in table.items() if path == name or path.endswith(f".{name}")), None)


def plan_splits(model: nn.Module, plan: ShardingPlan, tp_size: int) -> dict[str, Split]:
    """The split of every parameter that is split, by path; shapes are all that is looked at.

    Raises:
        ConfigError: something does not divide over the ranks.
        UnsupportedModelError: a projection split by rows has a bias that the plan does not split.
    """
    config = model.config.get_text_config()
    splits: dict[str, Split] = {}
    counts: dict[str, tuple[str, int]] = {}
    parameters = dict(model.named_parameters())
    for path, parameter in parameters.items():
        split = named(plan.splits, path)
        if split is not None:
            splits[path] = split
            bias = path.removesuffix("weight") + "bias"
            if split.dim == 0 and bias in parameters and named(plan.splits, bias) is None:
                raise UnsupportedModelError(
                    f"{bias} belongs to a projection that tp_size={tp_size} splits, and the plan of {type(model).__name__} "
                    "does not split it; use tp_size=1 with dcp_size > 1, where every rank holds the whole model"
                )
            size = parameter.shape[split.dim] // split.parts
            counts[path] = (split.groups, getattr(config, split.groups)) if split.groups else (f"dim {split.dim}", size)
    common = math.gcd(*(count for _, count in counts.values()))
    for path, (what, count) in counts.items():
        if count % tp_size:
            raise ConfigError(
                f"{path} {list(model.get_parameter(path).shape)}: {what}={count} does not divide over "
                f"tp_size={tp_size} ranks; choose a tp_size that divides {common}, or tp_size=1 with dcp_size > 1, where "
                "every rank holds the whole model"
            )
    return splits


def _check_attention_only(model: nn.Module) -> None:
    """UnsupportedModelError unless TRANSFORMERS_HEADS names the output projection of every attention layer."""
    paths = [path for path, _ in model.named_parameters() if ".self_attn." in path]
    attention = {path.rpartition(".self_attn.")[0] for path in paths}
    covered = {path.rpartition(".self_attn.")[0] for path in paths if path.endswith("o_proj.weight")}
    if attention - covered or any(hasattr(module, "conv1d") for module in model.modules()):
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be sharded with tp_size > 1: its class has no sharding_plan for all of its "
            "attention layers; use tp_size=1 (every rank holds the whole model) with dcp_size > 1"
        )
