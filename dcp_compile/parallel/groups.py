# SPDX-License-Identifier: Apache-2.0
"""Which rank belongs to which group.

The ranks of a DCP group are consecutive. With tensor parallelism they are consecutive ranks of one tensor-parallel
group, so that gathered heads come in the order of the output projection's shards. Ranks beyond one group form further,
independent replicas.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _compat
from ..config import DCPConfig
from ..errors import ConfigError
from .agreement import check_agreement
from .failures import answering_ranks, wait_for_device


@dataclass(frozen=True)
class ParallelLayout:
    """This rank's place.

    Attributes:
        tp_size, tp_rank: tensor parallelism (1, 0 without). dcp_size, dcp_rank: decode context parallelism.
        tp_group, dcp_group: process groups, None where the size is 1.
        replica: group of all ranks that work on the same requests, None for one rank.
        leader: global rank that decides for the replica.
        transport: library that carries the messages between devices of the model's kind, None for one rank.
        device: of the model on this rank, where messages start and arrive.
        timeout: seconds after which a rank that does not answer is lost.
    """

    tp_size: int = 1
    tp_rank: int = 0
    dcp_size: int = 1
    dcp_rank: int = 0
    tp_group: dist.ProcessGroup | None = None
    dcp_group: dist.ProcessGroup | None = None
    replica: dist.ProcessGroup | None = None
    leader: int = 0
    transport: str | None = None
    device: torch.device = torch.device("cpu")
    timeout: float = 60.0

    @property
    def is_leader(self) -> bool:
        return self.replica is None or dist.get_rank() == self.leader

    @property
    def heads_sharded(self) -> bool:
        return self.tp_size > 1

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The leader's value of ``tensor`` on every rank of the replica, where ``tensor`` lies."""
        if self.replica is None:
            return tensor
        sent = tensor.to(self.device).contiguous()
        with answering_ranks("passing on the leader's choice"):
            dist.broadcast(sent, src=self.leader, group=self.replica)
        return self.fetch(sent) if tensor.device.type == "cpu" else sent.to(tensor.device)

    def fetch(self, tensor: Tensor) -> Tensor:
        """``tensor`` on the CPU.

        Raises:
            RankError: the device did not get there in time.
        """
        self.wait()
        return tensor.cpu()

    def wait(self, arrived: torch.cuda.Event | None = None) -> None:
        """Wait for ``arrived``, or for all that the device has been given to do if other ranks take part in it.

        Raises:
            RankError: that took more than ``timeout`` seconds.
        """
        if self.replica is None or self.device.type != "cuda":
            if arrived is not None:
                arrived.synchronize()
            return
        if arrived is None:
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(self.device))
        groups = {id(group): group for group in (self.tp_group, self.dcp_group, self.replica) if group is not None}
        wait_for_device(arrived, list(groups.values()), self.timeout)


def parallel_layout(config: DCPConfig, device: torch.device) -> ParallelLayout:
    """Create the groups of ``config``; every rank must call it. Equal sizes share one group.

    The default process group is initialised from torchrun's environment when the program has not done so.

    Raises:
        ConfigError: the number of ranks does not fit tp_size and dcp_size.
        RankError: the ranks want different sizes, or one of them does not answer.
    """
    tp_size = config.tp_size
    dcp_size = config.dcp_size if config.dcp_size is not None else tp_size
    size = max(tp_size, dcp_size)
    if size == 1:
        return ParallelLayout(device=device, timeout=config.timeout)
    with answering_ranks("starting up"):
        _initialise(size, device, config.timeout)
        world, rank = dist.get_world_size(), dist.get_rank()
        timeout = timedelta(seconds=config.timeout)
        everyone = dist.new_group(timeout=timeout)
    transport = _transport(everyone, device)
    check_agreement(everyone, {"tp_size": tp_size, "dcp_size": dcp_size})  # or they would wait for different groups
    if world % size:
        raise ConfigError(
            f"tp_size={tp_size} and dcp_size={dcp_size} need a multiple of {size} ranks, but {world} are running; "
            f"start the program with torchrun --nproc-per-node {size}"
        )
    groups = {1: None, world: everyone}
    with answering_ranks("forming groups"):
        for other in (tp_size, dcp_size):
            if other not in groups:
                groups[other] = _own_group(other, timeout)
    if device.type == "cuda":
        for group in {id(group): group for group in groups.values() if group is not None}.values():
            # What the library does after its own time limit is end the process: ours raises before.
            _compat.set_collective_timeout(group, timedelta(seconds=2 * config.timeout))
    return ParallelLayout(
        tp_size=tp_size,
        tp_rank=rank % tp_size,
        dcp_size=dcp_size,
        dcp_rank=rank % dcp_size,
        tp_group=groups[tp_size],
        dcp_group=groups[dcp_size],
        replica=groups[size],
        leader=rank // size * size,
        transport=transport,
        device=device,
        timeout=config.timeout,
    )


def _initialise(size: int, device: torch.device, timeout: float) -> None:
    if dist.is_initialized():
        return
    running = int(os.environ.get("WORLD_SIZE", "1"))
    if running < size:
        found = "this program runs as one process" if running == 1 else f"{running} are running"
        raise ConfigError(f"{size} ranks are needed but {found}; start it with torchrun --nproc-per-node {size}")
    # With NCCL alone, what lies on the CPU could not be exchanged: a model is loaded there before it is moved.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))


def _transport(group: dist.ProcessGroup, device: torch.device) -> str:
    """What torch.distributed uses for tensors on a device.

    Raises:
        ConfigError: nothing, as the program has initialised it.
    """
    backends = str(dist.get_backend_config(group))
    by_device = dict(pair.split(":") for pair in backends.split(","))
    if device.type not in by_device:
        raise ConfigError(
            f"the model is on {device.type}, but torch.distributed was initialised for {backends} and carries no messages there; "
            f'call init_process_group("cpu:gloo,cuda:nccl"), or leave it to optimize()'
        )
    return by_device[device.type]


def _own_group(size: int, timeout: timedelta) -> dist.ProcessGroup:
    """This rank's group of ``size`` consecutive ranks. Every rank creates every group, as the library requires."""
    own = None
    for first in range(0, dist.get_world_size(), size):
        ranks = list(range(first, first + size))
        group = dist.new_group(ranks, timeout=timeout)
        if dist.get_rank() in ranks:
            own = group
    return own
