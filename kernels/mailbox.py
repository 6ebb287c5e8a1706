# SPDX-License-Identifier: Apache-2.0
"""Messages between the ranks of one node, through memory that every rank can write.

Program ``c`` of a kernel is *channel* ``c``: on every rank it carries the same units, ``PER`` of them at a time, pushes its
own to all mailboxes, raises its flag there, and waits for the flags of channel ``c`` of all ranks in its own. Channels never
wait for one another, so that nothing but the programs of one channel must run at the same time.

A flag is the number of the channel's launch, its *epoch*, counted on the device: a replayed graph goes on counting. In each
mailbox every rank has two places per channel, by the parity of the epoch, and that is enough: who writes epoch e + 2 has seen
every rank's flag of e + 1, raised by a kernel that started after the kernel of epoch e had read its messages and ended. The
places are the channel's own, because a launch of another size, whose units go by other channels, is another epoch to them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 128
"""Programs of a launch; all are resident at once on every GPU with peer access (132 multiprocessors and more)."""

_ALIGNMENT = 128
LOOKS_BETWEEN = tl.constexpr(4096)  # at a flag, between two at whether a rank is lost already


@dataclass(frozen=True)
class Mailbox:
    """This rank's view of the mailboxes of a group.

    Attributes:
        bases: ``[size]`` int64, the address of every rank's mailbox of :func:`mailbox_bytes` zeroed bytes.
        calls: ``[CHANNELS]`` int64, zero at first: launches so far.
        lost: ``[1]`` int32, zero at first, readable by the host: 1 + the rank that did not answer.
        rank, size: of the group.
        units: most units (rows times heads) of a message; unit_bytes: most bytes of one, a multiple of 16.
        polls: looks at a flag, each about a microsecond on a GPU, before its rank counts as lost.
    """

    bases: Tensor
    calls: Tensor
    lost: Tensor
    rank: int
    size: int
    units: int
    unit_bytes: int
    polls: int

    def fits(self, units: int, unit_bytes: int) -> bool:
        return units <= self.units and unit_bytes <= self.unit_bytes

    def too_large(self, message: Tensor) -> str:
        return (
            f"a message of {tuple(message.shape)} {message.dtype} is too large for mailboxes of {self.units} units of "
            f"{self.unit_bytes} bytes"
        )


def mailbox_bytes(size: int, units: int, unit_bytes: int) -> int:
    """Size of one rank's mailbox: flags, then two LSEs and two messages per rank and unit that the channels have room for."""
    return _lse_at(size) + lse_bytes(size, units) + 2 * size * CHANNELS * _room(units) * unit_bytes


def lse_bytes(size: int, units: int) -> int:
    return triton.cdiv(2 * size * CHANNELS * _room(units) * 4, _ALIGNMENT) * _ALIGNMENT


def _lse_at(size: int) -> int:
    return triton.cdiv(size * CHANNELS * 8, _ALIGNMENT) * _ALIGNMENT


def constants(mailbox: Mailbox, message: Tensor, units: int) -> dict[str, int]:
    """The compile-time arguments that every kernel on ``mailbox`` takes, for a message of ``units`` units.

    Units lie ``STRIDE`` elements apart, the same number of bytes whatever a message's width and type are, so that places
    are the same ones in every launch.
    """
    return {
        "RANK": mailbox.rank,
        "SIZE": mailbox.size,
        "BLOCK_SIZE": triton.next_power_of_2(mailbox.size),
        "PER": _per(units),
        "ROOM": _room(mailbox.units),
        "CHANNELS": CHANNELS,
        "STRIDE": mailbox.unit_bytes // message.element_size(),
        "LSE_AT": _lse_at(mailbox.size),
        "DATA_AT": _lse_at(mailbox.size) + lse_bytes(mailbox.size, mailbox.units),
    }


def _per(units: int) -> int:
    """Units a program handles at once: what lets one turn of all channels carry the message, as far as registers go."""
    return min(8, triton.next_power_of_2(triton.cdiv(units, CHANNELS)))


def _room(units: int) -> int:
    """Most units of one channel in a message of ``units`` units; in a smaller message no channel has more."""
    return triton.cdiv(units, CHANNELS * _per(units)) * _per(units)


def grid(units: int) -> tuple[int]:
    """One program per channel that has a unit."""
    return (min(triton.cdiv(units, _per(units)), CHANNELS),)


@triton.jit
def place(epoch, source, unit, SIZE: tl.constexpr, PER: tl.constexpr, ROOM: tl.constexpr, CHANNELS: tl.constexpr):
    """Index of the message of ``source`` about ``unit``, among those of its channel, which has room for ROOM units."""
    turn, channel, number = unit // (PER * CHANNELS), unit // PER % CHANNELS, unit % PER
    return ((epoch % 2 * SIZE + source) * CHANNELS + channel) * ROOM + turn * PER + number


@triton.jit
def region(bases, owner, AT: tl.constexpr, KIND: tl.constexpr):
    """Pointer to the part of ``owner``'s mailbox that begins at byte ``AT``."""
    return tl.multiple_of((tl.load(bases + owner) + AT).to(tl.pointer_type(KIND)), 16)


@triton.jit
def signal(bases, channel, epoch, RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHANNELS: tl.constexpr):
    """Raise this rank's flag in every mailbox, after everything this program has written there."""
    tl.debug_barrier()
    peer = tl.arange(0, BLOCK_SIZE)
    flags = tl.load(bases + peer, mask=peer < SIZE, other=0).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(flags + RANK * CHANNELS + channel, epoch, mask=peer < SIZE, sem="release", scope="sys")


@triton.jit
def await_all(
    bases, channel, epoch, polls, lost,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Wait for the flags of all ranks; one that stays down for ``polls`` looks is noted in ``lost`` and given up."""
    source = tl.arange(0, BLOCK_SIZE)
    flags = region(bases, RANK, 0, tl.int64) + source * CHANNELS + channel
    late = tl.max(_is_late(flags, epoch, source, SIZE), 0)
    looks = polls * 0
    while (late > 0) & (looks < polls):
        late = tl.max(_is_late(flags, epoch, source, SIZE), 0)
        looks += 1
        if looks % LOOKS_BETWEEN == 0:  # seldom: it lies with the host
            if tl.load(lost, volatile=True) != 0:
                polls = looks  # what is lost in one exchange is lost in all that follow
    if late > 0:
        tl.store(lost, late)
    tl.debug_barrier()


@triton.jit
def _is_late(flags, epoch, source, SIZE: tl.constexpr):
    """1 + the rank of every flag that is still down, 0 for the others."""
    seen = tl.atomic_add(flags, 0, mask=source < SIZE, sem="acquire", scope="sys")
    return tl.where((source < SIZE) & (seen < epoch), source + 1, 0)


def view(bases: Tensor, rank: int, units: int, unit_bytes: int, polls: int) -> Mailbox:
    """This rank's view of mailboxes at the addresses ``bases [size]``."""
    lost = torch.zeros(1, dtype=torch.int32, pin_memory=bases.is_cuda)  # the device writes it, the host reads it unasked
    calls = bases.new_zeros(CHANNELS)
    return Mailbox(bases, calls, lost, rank, len(bases), units, unit_bytes, polls)
