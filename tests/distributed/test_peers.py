# SPDX-License-Identifier: Apache-2.0
"""Which way ranks exchange attention, why, and what a rank that is lost in a mailbox comes to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dcp_compile.errors import ConfigError, RankError
from dcp_compile.parallel import peers

GROUP = SimpleNamespace(group_name="peers under test")
SIZES = {"rows": 8, "heads": 4, "width": 64, "timeout": 1.0}


def test_one_rank_exchanges_nothing() -> None:
    assert peers.open_exchange(None, torch.device("cpu"), "peers", **SIZES).name == "none"


@pytest.mark.parametrize("wanted, reason", [("auto", "tensors are on cpu"), ("collectives", "as configured")])
def test_tensors_on_the_cpu_go_by_collectives(wanted: str, reason: str) -> None:
    path = peers.open_exchange(GROUP, torch.device("cpu"), wanted, **SIZES)
    assert path.name == "collectives" and path.reason.startswith(reason)


def test_peers_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match='exchange="peers" is not possible here: tensors are on cpu.* choose "auto"'):
        peers.open_exchange(GROUP, torch.device("cpu"), "peers", **SIZES)


@pytest.mark.parametrize("others, apart, reason", [
    ([("here", 1)], [[], []], None),
    ([("there", 0)], [[], []], "the ranks run on 2 hosts"),
    ([("here", 0)], [[], []], "several ranks share a GPU"),
    ([("here", 1)], [[], [0]], "GPU 1 cannot write the memory of GPU 0"),
])  # fmt: skip
def test_every_rank_gets_the_first_reason_against(
    monkeypatch: pytest.MonkeyPatch, others: list[tuple[str, int]], apart: list[list[int]], reason: str | None
) -> None:
    answers = iter(([("here", 0), *others], apart))

    def gather(out: list, mine: object, group: object) -> None:
        out[:] = next(answers)

    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    assert peers._unavailable(GROUP, torch.device("cuda", 0)) == reason


def test_a_rank_lost_in_a_mailbox_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = [SimpleNamespace(lost=torch.tensor([0], dtype=torch.int32)) for _ in range(4)]
    monkeypatch.setitem(peers._opened, GROUP.group_name, boxes)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 5])
    peers.check_answering(None)
    peers.check_answering(GROUP)
    boxes[1].lost[0] = 2
    with pytest.raises(RankError, match="rank 5 did not answer in time while exchanging attention"):
        peers.check_answering(GROUP)
