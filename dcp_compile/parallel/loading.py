# SPDX-License-Identifier: Apache-2.0
"""Loading one rank's part of a model: every rank reads its slices of every tensor, from one file at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .. import _compat
from ..config import DCPConfig, check_experts_dealt
from ..errors import CheckpointError
from .groups import ParallelLayout, parallel_layout
from .plan import ShardingPlan, Split, find_plan, plan_splits
from .shard import ModelShard, count_query_ranks

_SAMPLES, _SAMPLE_BYTES = 64, 64
_TIMEOUT = 1800.0
"""Seconds for which ranks wait for one that reads slowly. optimize() brings in its own."""


class CheckpointFiles:
    """Tensors of several safetensors files, of which one at a time is mapped into memory.

    Attributes:
        bytes_read: of the slices that were asked for.
    """

    def __init__(self, paths: Sequence[str | os.PathLike]) -> None:
        self.paths = [os.fspath(path) for path in paths]
        self.bytes_read = 0
        self._path: str | None = None
        self._file: Any = None

    def entries(self) -> dict[str, FileEntry]:
        """All tensors by name."""
        found = {}
        for path in self.paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    entry = file.get_slice(name)
                    found[name] = FileEntry(self, path, name, tuple(entry.get_shape()), entry.get_dtype())
        return found

    def read(self, path: str, name: str, index: Any) -> Tensor:
        """A copy of ``tensor[index]``, index being slices or an ellipsis."""
        if path != self._path:
            self._file = None  # unmaps the one before
            self._file, self._path = safe_open(path, framework="pt"), path
        part = self._file.get_slice(name)[index].clone(memory_format=torch.contiguous_format)
        self.bytes_read += part.nbytes
        return part

    def close(self) -> None:
        self._file = self._path = None

    def fingerprint(self) -> str:
        """A digest of names, sizes, headers and some bytes of all files."""
        digest = hashlib.sha256()
        for path in map(Path, self.paths):
            size = path.stat().st_size
            with path.open("rb") as file:
                header = 8 + int.from_bytes(file.read(8), "little")
                file.seek(0)
                digest.update(f"{path.name} {size}".encode() + file.read(header))
                for sample in range(_SAMPLES):
                    file.seek(header + (size - header) * sample // _SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class FileEntry:
    """A tensor in a file, read where it is indexed; ``dtype`` is the file format's name, such as "U8"."""

    files: CheckpointFiles
    path: str
    name: str
    shape: tuple[int, ...]
    dtype: str

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.dtype

    def __getitem__(self, index: Any) -> Tensor:
        return self.files.read(self.path, self.name, index)


@dataclass(frozen=True)
class OwnPart:
    """The part of a checkpoint's tensor that a rank holds, read when it is indexed."""

    entry: Any
    shape: tuple[int, ...]
    split: Split
    rank: int
    size: int

    def __getitem__(self, index: Any) -> Tensor:
        return self.split.cut(self.entry, self.shape, self.rank, self.size)[index]


class ShardLoading:
    """One from_pretrained() of a part of a model."""

    def __init__(self, ranks: ParallelLayout, expert_parallel: bool, query_ranks: int) -> None:
        self.ranks, self.expert_parallel, self.query_ranks = ranks, expert_parallel, query_ranks
        self.files = CheckpointFiles([])
        self.plan: ShardingPlan | None = None
        self.shard: ModelShard | None = None

    def open(self, paths: Sequence[str]) -> dict[str, FileEntry]:
        """The tensors of the checkpoint."""
        self.files = CheckpointFiles(paths)
        return self.files.entries()

    def own_parts(self, model: nn.Module, sources: Mapping[str, Any]) -> dict[str, Any]:
        """Give a model without storage the shapes of this rank's part; ``sources`` by parameter, cut to that part.

        Raises:
            UnsupportedModelError, ConfigError: the model cannot be split, or not over so many ranks.
        """
        ranks = self.ranks
        self.plan = find_plan(model, self.expert_parallel, self.query_ranks)
        splits = plan_splits(model, self.plan, ranks.tp_size)
        parts = dict(sources)
        for path, split in splits.items():
            if path in sources:
                shape = tuple(model.get_parameter(path).shape)
                parts[path] = OwnPart(sources[path], shape, split, ranks.tp_rank, ranks.tp_size)
        self.shard = ModelShard(
            ranks.tp_size, ranks.tp_rank, ranks.tp_group, self.expert_parallel, self.query_ranks, splits,
            files=self.files.fingerprint(),
        )  # fmt: skip
        for path, split in splits.items():
            parameter = model.get_parameter(path)
            parameter.data = split.cut(parameter.data, parameter.shape, ranks.tp_rank, ranks.tp_size)
        return parts

    def finish(self, model: nn.Module) -> None:
        """Connect the loaded part to those of the other ranks."""
        self.files.close()
        self.shard.bytes_read = self.files.bytes_read
        self.shard.connect(model, self.plan)


_current: ContextVar[ShardLoading | None] = ContextVar("shard_loading", default=None)


def shard_loading() -> ShardLoading | None:
    """The loading of a part that is going on; None while a whole model is loaded."""
    return _current.get()


class ShardedLoading:
    """Mixed in before PreTrainedModel: ``from_pretrained`` takes ``tp_size`` and how to split."""

    @classmethod
    def from_pretrained(
        cls,
        *args: Any,
        tp_size: int = 1,
        expert_parallel: bool = False,
        query_projection: str = "sharded",
        dcp_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """As PreTrainedModel.from_pretrained; with ``tp_size`` > 1, this rank's part of the model.

        Every rank of a program under torchrun calls it. ``forward()`` and ``generate()`` of the parts give on every
        rank what the whole model gives.

        Args:
            tp_size: ranks that hold one model together.
            expert_parallel: deal experts whole to the ranks; otherwise every rank has a slice of each.
            query_projection: see :class:`~dcp_compile.DCPConfig`.
            dcp_size: ranks of the DCP group that optimize() will make, which "replicated" queries are shared in; None:
                all of them. Has no other use here.

        Raises:
            ConfigError: the model does not divide over so many ranks, or they are not running.
            UnsupportedModelError: the model has no plan for being split, no experts to deal, or no queries to share.
            RankError: the ranks want different things.
        """
        if query_projection != "replicated":
            dcp_size = 1
        elif dcp_size is None:
            dcp_size = tp_size
        settings = DCPConfig(
            tp_size=tp_size, dcp_size=dcp_size, expert_parallel=expert_parallel, query_projection=query_projection,
            timeout=_TIMEOUT,
        )  # fmt: skip
        query_ranks = count_query_ranks(query_projection, tp_size, dcp_size)
        if tp_size == 1:
            check_experts_dealt(settings)
            return super().from_pretrained(*args, **kwargs)
        loading = ShardLoading(parallel_layout(settings, _any_device()), expert_parallel, query_ranks)
        token = _current.set(loading)
        try:
            with _one_progress_bar(), _compat.one_tensor_at_a_time():
                loaded = super().from_pretrained(*args, **kwargs)
        finally:
            _current.reset(token)
        loading.finish(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys=None):
        """The step of ``from_pretrained`` that reads tensors (transformers 5.17 and 5.24)."""
        loading = shard_loading()
        if loading is not None:
            files = checked_files(model, state_dict, checkpoint_files, load_config)
            entries = {**(state_dict or {}), **loading.open(files)}
            state_dict, checkpoint_files = loading.own_parts(model, _fitting(model, entries)), None
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys)


def _any_device() -> torch.device:
    """Where the ranks may keep the model; it is loaded before one knows."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def checked_files(model, state_dict, checkpoint_files, load_config) -> list[str]:
    """The files to read: none if a state dict was given.

    Raises:
        CheckpointError: not safetensors, or a device_map that parts cannot follow.
    """
    files = [] if state_dict is not None else checkpoint_files
    if any(not file.endswith(".safetensors") for file in files):
        raise CheckpointError(f"{files[0]} is not a safetensors file; convert the checkpoint to safetensors")
    devices = {str(device) for device in (load_config.device_map or {}).values()}
    if shard_loading() is not None and len(devices) > 1:
        raise CheckpointError(
            f"device_map spreads {type(model).__name__} over {', '.join(sorted(devices))}; with tp_size > 1 every rank "
            "has one device"
        )
    return files


def _fitting(model: nn.Module, entries: Mapping[str, Any]) -> Mapping[str, Any]:
    for path, parameter in model.named_parameters():
        entry = entries.get(path)
        found = None if entry is None else tuple(entry.shape)
        if found not in (None, tuple(parameter.shape)):
            raise CheckpointError(f"{path} is {list(found)} in the checkpoint, the model needs {list(parameter.shape)}")
    return entries


@contextmanager
def _one_progress_bar():
    """transformers' progress bars, on the first rank only."""
    silent = logging.is_progress_bar_enabled() and torch.distributed.get_rank() != 0
    if silent:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if silent:
            logging.enable_progress_bar()
