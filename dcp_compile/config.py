# SPDX-License-Identifier: Apache-2.0
"""The settings of :func:`dcp_compile.optimize`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from .errors import ConfigError

DECODE_LAYOUTS = ("auto", "split", "flattened")
LOWERINGS = ("auto", "eager", "inductor")
QUERY_PROJECTIONS = ("sharded", "replicated")
EXCHANGES = ("auto", "collectives", "peers")
VERIFY_MODES = ("full", "adaptive")

_MOST = 2**31 - 1  # of anything that kernels count in int32
_SCALES = (1e-30, 1e30)  # float32 holds the scale, its reciprocal and 448 times it


@dataclass(frozen=True)
class DCPConfig:
    """Settings, validated on construction.

    Attributes:
        dcp_size: ranks over which the KV cache is sharded by token; None = all ranks of the tensor-parallel group, or 1.
        tp_size: ranks that hold one model together; 1 = every rank holds all of it, or the part it has loaded.
        expert_parallel: with tp_size > 1, deal experts whole to the ranks; else every rank has a slice of each.
        query_projection: with tp_size > 1 and dcp_size > 1, "sharded": every rank makes the queries of its own heads,
            and each layer gathers those of its DCP group; or "replicated": every rank holds the query projections and
            key up-projections of its DCP group and makes all of its queries, one message per layer less for more
            weights.
        block_size: tokens per page on one rank.
        kv_interleave: consecutive tokens that stay on one rank; divides block_size.
        max_batch_size: requests held at once.
        max_seq_len: tokens one request may hold, prompt and new tokens together.
        prefill_chunk: prompt tokens per request that one prefill step takes.
        kv_cache_dtype: "auto" (the model's) or the name of a floating-point torch dtype, of 8 bits "float8_e4m3fn"
            only. Holds for the target's cache and for that of a draft with latent attention; a draft with
            grouped-query attention keeps its own dtype.
        kv_cache_scale: what the values of a float8 cache are multiplied by when they are read. Stored is the value
            divided by it; beyond +-448 times the scale values saturate.
        backend, draft_backend: "auto" or the name of an attention backend.
        decode_layout: "split" (final prefix + short tail), "flattened" (every row its own bound), or "auto" (what the
            attention backend is best at).
        exchange: how ranks exchange attention: "peers" (through peer memory, GPUs of one host), "collectives", or "auto"
            (peers where possible).
        lowering: "eager", "inductor", or "auto" (inductor on a GPU, eager on a CPU).
        cuda_graphs: "auto" (on a GPU), True or False.
        num_speculative_tokens: most draft tokens one verify step judges.
        draft_window: tokens of context a DSpark draft attends to, the latest ones; None = all.
        verify: "full" (whole drafts) or "adaptive" (as much of each draft as is expected to pay for its time, which is
            measured by optimize()).
        timeout: seconds after which a rank that does not answer is an error.

    Raises:
        ConfigError: a setting is out of range, or contradicts another one.
    """

    dcp_size: int | None = None
    tp_size: int = 1
    expert_parallel: bool = False
    query_projection: str = "sharded"
    block_size: int = 64
    kv_interleave: int = 1
    max_batch_size: int = 8
    max_seq_len: int = 4096
    prefill_chunk: int = 256
    kv_cache_dtype: str = "auto"
    kv_cache_scale: float = 1.0
    backend: str = "auto"
    draft_backend: str = "auto"
    decode_layout: str = "auto"
    exchange: str = "auto"
    lowering: str = "auto"
    cuda_graphs: bool | str = "auto"
    num_speculative_tokens: int = 7
    draft_window: int | None = None
    verify: str = "full"
    timeout: float = 60.0

    def __post_init__(self) -> None:
        for name in ("tp_size", "block_size", "kv_interleave", "max_batch_size", "max_seq_len", "prefill_chunk"):
            _check_integer(name, getattr(self, name), 1)
        _check_integer("num_speculative_tokens", self.num_speculative_tokens, 0)
        for name in ("dcp_size", "draft_window"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 1)
        if self.block_size % self.kv_interleave:
            raise ConfigError(
                f"kv_interleave={self.kv_interleave} does not divide block_size={self.block_size}: a run of consecutive "
                f"tokens must not cross a page; choose a divisor of {self.block_size}"
            )
        pages = self.max_batch_size * -(-self.max_seq_len // self.block_size)
        if pages > _MOST:
            raise ConfigError(
                f"max_batch_size={self.max_batch_size} requests of max_seq_len={self.max_seq_len} tokens take {pages} pages of "
                f"block_size={self.block_size}, above {_MOST}; make one of the first two smaller"
            )
        _check_choice("decode_layout", self.decode_layout, DECODE_LAYOUTS)
        _check_choice("exchange", self.exchange, EXCHANGES)
        _check_choice("lowering", self.lowering, LOWERINGS)
        _check_choice("verify", self.verify, VERIFY_MODES)
        _check_choice("cuda_graphs", self.cuda_graphs, ("auto", True, False))
        _check_choice("expert_parallel", self.expert_parallel, (True, False))
        _check_choice("query_projection", self.query_projection, QUERY_PROJECTIONS)
        for name in ("backend", "draft_backend"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(f'{name}={getattr(self, name)!r} must be "auto" or the name of an attention backend')
        _check_dtype("kv_cache_dtype", self.kv_cache_dtype)
        _check_scale(self.kv_cache_scale, self.kv_cache_dtype)
        if self.dcp_size is not None and self.tp_size > 1 and self.tp_size % self.dcp_size:
            raise ConfigError(
                f"dcp_size={self.dcp_size} does not divide tp_size={self.tp_size}: the ranks of a DCP group are "
                "consecutive ranks of one tensor-parallel group; choose a divisor"
            )
        timeout = self.timeout
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
            raise ConfigError(f"timeout={timeout!r} must be a positive, finite number of seconds")

    def replace(self, **changes: object) -> DCPConfig:
        """A validated copy with some settings changed.

        Raises:
            ConfigError: there is no such setting, or the new ones are out of range or contradict one another.
        """
        unknown = sorted(set(changes) - {field.name for field in dataclasses.fields(self)})
        if unknown:
            known = ", ".join(field.name for field in dataclasses.fields(self))
            raise ConfigError(f"unknown setting {', '.join(unknown)}; known settings: {known}")
        return dataclasses.replace(self, **changes)


def check_experts_dealt(config: DCPConfig) -> None:
    """ConfigError for experts to be dealt over one rank, once it is known that no model loaded in parts brings more."""
    if config.expert_parallel and config.tp_size == 1:
        raise ConfigError("expert_parallel=True needs tp_size > 1: one rank has nobody to deal experts to")


def _check_integer(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name}={value!r} must be an integer of at least {low}")
    if value > _MOST:
        raise ConfigError(f"{name}={value} is above {_MOST}: positions, rows and pages are counted in 32 bits")


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if not any(type(value) is type(choice) and value == choice for choice in choices):  # 1 == True
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}")


def _check_dtype(name: str, value: object) -> None:
    dtype = getattr(torch, value, None) if isinstance(value, str) else None
    if value != "auto" and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(
            f'{name}={value!r} must be "auto" or the name of a floating-point torch dtype, such as "bfloat16"'
        )
    if dtype is not None and dtype.itemsize == 1 and dtype != torch.float8_e4m3fn:
        raise ConfigError(
            f'{name}={value!r} is not supported: the one 8-bit type of a cache is "float8_e4m3fn"; choose that or a '
            "16-bit type"
        )


def _check_scale(value: object, dtype: str) -> None:
    low, high = _SCALES
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"kv_cache_scale={value!r} must be a number from {low} to {high}, such as 1.0")
    if value != 1 and dtype != "float8_e4m3fn":
        raise ConfigError(
            f"kv_cache_scale={value!r} with kv_cache_dtype={dtype!r}: only a float8 cache is scaled; leave the scale "
            'out or choose kv_cache_dtype="float8_e4m3fn"'
        )
