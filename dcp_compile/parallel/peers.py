# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a DCP group exchange attention: through mailboxes in peer memory, or by collectives.

Mailboxes need GPUs of one host that can write one another's memory. They carry steps of few rows, where the time of a
collective is all latency; longer ones (prompt chunks) always go by collectives.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .. import _compat
from ..errors import ConfigError, RankError
from ..ops.exchange import MAILBOXES, Mailboxes
from .failures import REMEDY, answering_ranks

if TYPE_CHECKING:
    from ..kernels.mailbox import Mailbox

MOST_ROWS = 64
_POLLS_PER_SECOND = 10**6


@dataclass(frozen=True)
class ExchangePath:
    """The way chosen ("peers" or "collectives") and why, for :func:`dcp_compile.explain`."""

    name: str
    reason: str


def open_exchange(
    group: dist.ProcessGroup | None,
    device: torch.device,
    wanted: str,
    rows: int,
    heads: int,
    width: int,
    timeout: float,
) -> ExchangePath:
    """Choose the path of ``group`` and open its mailboxes if they are used; every rank of the group must call it.

    Args:
        wanted: "auto", "peers" or "collectives". rows: most query rows of a decode or verify step.
        heads: of one rank's messages. width: most bytes per row and head, of a query or an output.
        timeout: seconds after which a rank that does not answer is lost.

    Raises:
        ConfigError: "peers" is wanted and some rank cannot; the reason is named.
    """
    if group is None:
        return ExchangePath("none", "one rank")
    if wanted == "collectives":
        return ExchangePath("collectives", "as configured")
    reason = _unavailable(group, device)
    if reason is not None:
        if wanted == "peers":
            raise ConfigError(f'exchange="peers" is not possible here: {reason}; choose "auto" or "collectives"')
        return ExchangePath("collectives", reason)
    rows, width = min(rows, MOST_ROWS), -(-width // 16) * 16
    boxes = MAILBOXES.get(group.group_name)
    if boxes is None or not boxes.merge.fits(rows * heads, width):
        boxes = Mailboxes(*(_mailbox(group, device, rows * heads, width, timeout) for _ in ("gather", "merge")))
        MAILBOXES[group.group_name] = boxes
        _opened.setdefault(group.group_name, []).extend((boxes.gather, boxes.merge))
    return ExchangePath("peers", f"steps of up to {rows} rows through peer memory, longer ones by collectives")


_opened: dict[str, list[Mailbox]] = {}  # by group; captured graphs go on using mailboxes that larger ones replaced


def check_answering(group: dist.ProcessGroup | None) -> None:
    """Raise what the kernels of past steps noted.

    Raises:
        RankError: a rank did not answer in a mailbox.
    """
    for box in _opened.get(group.group_name, ()) if group is not None else ():
        lost = int(box.lost)
        if lost:
            rank = dist.get_process_group_ranks(group)[lost - 1]
            raise RankError(f"rank {rank} did not answer in time while exchanging attention. {REMEDY}")


def _unavailable(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The first reason any rank has against mailboxes; all ranks get the same answer."""
    if device.type != "cuda":
        return f"tensors are on {device.type}; peer memory is a matter of CUDA devices"
    mine = (socket.gethostname(), device.index)
    places: list[tuple[str, int]] = [mine] * dist.get_world_size(group)
    with answering_ranks("choosing how to exchange attention"):
        dist.all_gather_object(places, mine, group=group)
    hosts, devices = (list(column) for column in zip(*places))
    if len(set(hosts)) > 1:
        return f"the ranks run on {len(set(hosts))} hosts"
    if len(set(devices)) < len(devices):
        return "several ranks share a GPU"
    apart = [other for other in devices if other != device.index and not torch.cuda.can_device_access_peer(device, other)]
    answers: list[list[int]] = [apart] * len(devices)
    with answering_ranks("choosing how to exchange attention"):
        dist.all_gather_object(answers, apart, group=group)
    for one, others in zip(devices, answers):
        if others:
            return f"GPU {one} cannot write the memory of GPU {others[0]}"
    return None


def _mailbox(group: dist.ProcessGroup, device: torch.device, units: int, unit_bytes: int, timeout: float) -> Mailbox:
    from ..kernels.mailbox import mailbox_bytes, view  # needs Triton

    size = dist.get_world_size(group)
    with answering_ranks("opening mailboxes"):
        addresses = _compat.peer_memory(mailbox_bytes(size, units, unit_bytes), device, group)
    polls = int(timeout * _POLLS_PER_SECOND)
    return view(torch.tensor(addresses, device=device), dist.get_rank(group), units, unit_bytes, polls)
