# SPDX-License-Identifier: Apache-2.0
"""Waiting for a device whose kernels may themselves wait for a rank that is gone."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from dcp_compile import _compat
from dcp_compile.errors import ConfigError, RankError
from dcp_compile.parallel import ParallelLayout, failures, groups
from dcp_compile.parallel.failures import wait_for_device


class Event:
    """One that is over after it has been asked ``rounds`` times; never, if that is negative."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.waited = rounds, False

    def query(self) -> bool:
        self.rounds -= 1
        return self.rounds == -1

    def synchronize(self) -> None:
        self.waited = True


@pytest.fixture
def aborted(monkeypatch) -> list[Any]:
    groups: list[Any] = []
    monkeypatch.setattr(_compat, "abort_collectives", groups.extend)
    return groups


@pytest.mark.parametrize("rounds", [0, 1, 40])
def test_a_device_that_arrives_is_waited_for(aborted, rounds: int) -> None:
    event = Event(rounds)
    wait_for_device(event, ["group"], timeout=60)
    assert event.rounds == -1 and not aborted


def test_a_device_that_does_not_arrive_is_an_error_in_time(aborted) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"another rank died, or did not answer within 0.2 s, while running a step\. .*start all"):
        wait_for_device(Event(-2), ["one", "other"], timeout=0.2)
    assert 0.2 < time.monotonic() - started < 5 and aborted == ["one", "other"]


def test_an_abort_that_waits_as_well_does_not_keep_the_error_back(monkeypatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(_compat, "abort_collectives", lambda groups: ended.wait(60))
    monkeypatch.setattr(failures, "_ABORT_S", 0.1)
    with pytest.raises(RankError):
        wait_for_device(Event(-2), [], timeout=0.0)
    ended.set()


def test_waiting_lets_other_threads_run() -> None:
    event, ran = Event(-2), []
    event.query = lambda: bool(ran)
    threading.Timer(0.1, ran.append, (True,)).start()
    wait_for_device(event, [], timeout=60)
    assert ran


def test_every_group_of_a_rank_is_aborted_once(aborted) -> None:
    layout = ParallelLayout(
        tp_size=4, dcp_size=2, tp_group="all", dcp_group="pair", replica="all", device=torch.device("cuda"), timeout=0.0
    )
    with pytest.raises(RankError, match="within 0 s"):
        layout.wait(Event(-2))
    assert sorted(aborted) == ["all", "pair"]


def test_one_rank_waits_without_a_limit(aborted) -> None:
    event = Event(-2)
    ParallelLayout(timeout=0.0).wait(event)
    assert event.waited and not aborted
    ParallelLayout(timeout=0.0).wait()
    assert ParallelLayout().fetch(torch.tensor([3])).tolist() == [3]


@pytest.fixture
def group(request):
    """A group of this process alone, with the backends given."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(request.param, store=store, rank=0, world_size=1, timeout=timedelta(seconds=7))
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("group", ["gloo"], indirect=True)
def test_a_group_without_nccl_keeps_its_time_limit(group) -> None:
    """gloo carries messages of both kinds of device in one object, and raises by itself."""
    _compat.set_collective_timeout(group, timedelta(seconds=99))
    _compat.abort_collectives([group])
    assert group._get_backend(torch.device("cuda")).options._timeout == timedelta(seconds=7)
    torch.distributed.barrier(group=group)


@pytest.mark.parametrize("group", ["cpu:gloo"], indirect=True)
def test_a_group_that_carries_nothing_between_gpus_is_refused(group) -> None:
    message = r'the model is on cuda, but .* initialised for cpu:gloo .* call init_process_group\("cpu:gloo,cuda:nccl"\)'
    with pytest.raises(ConfigError, match=message):
        groups._transport(group, torch.device("cuda"))
    assert groups._transport(group, torch.device("cpu")) == "gloo"
