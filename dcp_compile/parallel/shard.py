# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a model: made from a whole one, or while it is loaded (see loading.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import CheckpointError, ConfigError
from .agreement import weights_fingerprint
from .groups import ParallelLayout
from .plan import ShardingPlan, Split, find_plan, named, plan_splits

_MARK = "own"
_c10d = torch.ops._c10d_functional  # collectives that a tracer records


@dataclass
class ModelShard:
    """The part, and what the ranks exchange.

    Attributes:
        tp_size, tp_rank, group: the ranks that hold the parts. The group is looked up at every exchange.
        expert_parallel: every rank holds some experts whole, not a slice of each.
        query_ranks: consecutive ranks of which each makes the queries of all; 1: every rank those of its own heads.
        splits: by path, for every parameter that is split.
        files: digest of the files the part was read from, None if it was cut from a whole model.
        bytes_read: of these files.
    """

    tp_size: int
    tp_rank: int
    group: dist.ProcessGroup
    expert_parallel: bool
    query_ranks: int
    splits: dict[str, Split]
    files: str | None = None
    bytes_read: int = 0
    _undo: list[Callable[[], None]] = field(default_factory=list)
    _device: torch.device = torch.device("cpu")

    def replicated_bytes(self, model: nn.Module) -> int:
        """What this part holds more than it would if every rank made the queries of its own heads."""
        shares = {path: split.sharers for path, split in self.splits.items() if split.sharers > 1}
        return sum(model.get_parameter(path).nbytes * (sharers - 1) // sharers for path, sharers in shares.items())

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of all ranks' tensors of this shape."""
        return _c10d.wait_tensor(_c10d.all_reduce(part, "sum", self.group.group_name))

    def all_gather(self, part: Tensor) -> Tensor:
        """``[..., n]`` -> ``[..., tp_size * n]``, rank 0's columns first."""
        whole = _c10d.all_gather_into_tensor(part.contiguous(), self.tp_size, self.group.group_name)
        return _c10d.wait_tensor(whole).unflatten(0, (self.tp_size, part.shape[0])).movedim(0, -2).flatten(-2)

    def replace(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute on the instance, until :meth:`restore`."""
        had = name in vars(module)
        before = vars(module).get(name)
        vars(module)[name] = value
        self._undo.append(lambda: vars(module).update({name: before}) if had else vars(module).pop(name))

    def mark(self, module: nn.Module, own: int) -> None:
        """Tell a module in a buffer, ``module.own``, which (or which first) of its rows or parts is this rank's."""
        module.register_buffer(_MARK, torch.tensor(own, device=self._device), persistent=False)
        self._undo.append(lambda: delattr(module, _MARK))

    def narrow(self, model: nn.Module) -> None:
        """Leave this rank's part of every parameter of a whole model, until :meth:`restore`."""
        for path, split in self.splits.items():
            parameter = model.get_parameter(path)
            full = parameter.data
            parameter.data = split.cut(full, full.shape, self.tp_rank, self.tp_size)
            self._undo.append(lambda parameter=parameter, full=full: setattr(parameter, "data", full))

    def connect(self, model: nn.Module, plan: ShardingPlan) -> None:
        """Have the modules of a narrowed model exchange what the plan says; it can no longer be saved."""
        self._device = next(model.parameters()).device
        for path, module in model.named_modules():
            exchange = named(plan.exchanges, path)
            if exchange is not None:
                exchange(self, module)
        name = type(model).__name__

        def save_pretrained(*arguments: Any, **options: Any) -> None:
            raise CheckpointError(
                f"this {name} is one of {self.tp_size} parts of a model: saving it would write a part; call "
                "dcp_compile.unoptimize(model) first if it was loaded whole, else load it without tp_size to save it"
            )

        self.replace(model, "save_pretrained", save_pretrained)
        self.replace(model, "_dcp_shard", self)

    def restore(self) -> None:
        """Undo everything: the model is the whole one again."""
        while self._undo:
            self._undo.pop()()

    def is_own(self, path: str) -> bool:
        """Whether the other ranks hold something else than this one under the name of a parameter or buffer."""
        return path in self.splits or path.rpartition(".")[2] == _MARK


def shard_of(model: nn.Module) -> ModelShard | None:
    """What ``model`` is a part of; None for a whole model."""
    return vars(model).get("_dcp_shard")


def weights_facts(model: nn.Module) -> dict[str, object]:
    """What ranks compare of their weights: all of them, or for parts what can be equal.

    Parts differ by rank. Their files are compared by name, size, header and samples, and what every rank holds whole
    value by value.
    """
    shard = shard_of(model)
    if shard is None:
        return {"loaded in parts": False, "weights": weights_fingerprint(model)}
    return {
        "loaded in parts": True,
        "checkpoint files": shard.files,
        "weights that every rank holds whole": weights_fingerprint(model, shard.is_own),
    }


def take_part(
    model: nn.Module, parallel: ParallelLayout, expert_parallel: bool, query_projection: str
) -> Callable[[], None]:
    """Make a model this rank's part with the groups of ``parallel``; one that was loaded as a part stays what it is.

    Args:
        expert_parallel, query_projection: see :class:`DCPConfig`.

    Returns:
        What brings back the model as it was.

    Raises:
        UnsupportedModelError, ConfigError: the model cannot be split, or not over so many ranks, or was loaded as a
            part for another number of them. Nothing is changed.
    """
    query_ranks = count_query_ranks(query_projection, parallel.tp_size, parallel.dcp_size)
    shard = shard_of(model)
    if shard is None:
        if parallel.tp_size == 1:
            return lambda: None
        return shard_model(model, parallel, expert_parallel, query_ranks).restore
    if shard.tp_size != parallel.tp_size:
        raise ConfigError(
            f"tp_size={parallel.tp_size}, but {type(model).__name__} was loaded with tp_size={shard.tp_size}; use the "
            "same for both"
        )
    if shard.query_ranks not in (1, parallel.dcp_size):
        raise ConfigError(
            f"dcp_size={parallel.dcp_size}, but {type(model).__name__} was loaded with "
            f'query_projection="replicated" and dcp_size={shard.query_ranks}; use the same for both'
        )
    before, shard.group = shard.group, parallel.tp_group
    return lambda: setattr(shard, "group", before)


def count_query_ranks(query_projection: str, tp_size: int, dcp_size: int) -> int:
    """Consecutive ranks of which each makes the queries of all (see :class:`DCPConfig`).

    Raises:
        ConfigError: "replicated" where no queries would be gathered.
    """
    if query_projection == "sharded":
        return 1
    if tp_size == 1 or dcp_size == 1:
        raise ConfigError(
            f'query_projection="replicated" with tp_size={tp_size}, dcp_size={dcp_size}: queries are gathered where '
            'both are larger than 1 only, so there is nothing to save; leave it "sharded"'
        )
    return dcp_size


def shard_model(
    model: nn.Module, parallel: ParallelLayout, expert_parallel: bool = False, query_ranks: int = 1
) -> ModelShard:
    """Keep this rank's part of a whole model.

    Raises:
        UnsupportedModelError, ConfigError: the model cannot be split, or not over so many ranks. Nothing is changed.
    """
    plan = find_plan(model, expert_parallel, query_ranks)
    splits = plan_splits(model, plan, parallel.tp_size)
    shard = ModelShard(parallel.tp_size, parallel.tp_rank, parallel.tp_group, expert_parallel, query_ranks, splits)
    try:
        shard.narrow(model)
        shard.connect(model, plan)
    except BaseException:  # no memory for a part's copy, say
        shard.restore()
        raise
    return shard
