# SPDX-License-Identifier: Apache-2.0
"""Exchanges through mailboxes: equal to collectives whatever rank is late, and bounded when one never comes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import triton.language as tl

from dcp_compile.kernels.mailbox import CHANNELS, Mailbox, mailbox_bytes, view
from dcp_compile.kernels.peer_gather import gather_heads
from dcp_compile.kernels.peer_merge import merge_ranks
from dcp_compile.ops.merge import merge_partials
from tests.distributed.scripts import run_script

UNITS, UNIT_BYTES = 300, 96


def mailboxes(size: int, polls: int, device: str) -> list[Mailbox]:
    """All ranks' mailboxes in one process; the caller keeps the first, which holds the memory."""
    memory = torch.full((size, mailbox_bytes(size, UNITS, UNIT_BYTES)), 255, dtype=torch.uint8, device=device)
    memory[:, : size * CHANNELS * 8] = 0
    addresses = torch.tensor([part.data_ptr() for part in memory], dtype=torch.int64, device=device)
    return [memory, *(view(addresses, rank, UNITS, UNIT_BYTES, polls) for rank in range(size))]


@pytest.mark.slow
@pytest.mark.seeds(1)
@pytest.mark.parametrize("size, calls", [(2, 4), (3, 2)])
@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are forked, which a process with a GPU cannot be")
def test_late_ranks_change_nothing(size: int, calls: int, seed: int) -> None:
    """Random shapes, shards empty and full, ranks that sleep before a call: the results are those of collectives."""
    errors = run_script("tests.kernels.peers", request={"size": size, "seed": seed, "calls": calls})
    assert all(isinstance(error, float) and error <= 2e-6 for error in errors), errors


def test_a_rank_that_never_comes_is_named(device: str) -> None:
    _memory, mine, _other = mailboxes(2, polls=30, device=device)
    gather_heads(torch.ones(1, 2, 8, device=device), mine)
    if device == "cuda":
        torch.cuda.synchronize()
    assert mine.lost.item() == 1 + 1


def test_a_lost_rank_is_not_waited_for_again(monkeypatch, device: str) -> None:
    """A step has many exchanges: after one that gave up the others do, too, without ``polls`` looks each."""
    if device == "cpu":  # compiled kernels keep the number they were compiled with
        monkeypatch.setattr("dcp_compile.kernels.mailbox.LOOKS_BETWEEN", tl.constexpr(16))
    _memory, mine, _other = mailboxes(2, polls=2**30, device=device)
    mine.lost.fill_(2)
    gather_heads(torch.ones(1, 1, 8, device=device), mine)
    assert mine.lost.item() == 2 and mine.calls[0] == 1


def test_messages_that_do_not_fit_are_refused(device: str) -> None:
    _memory, mine, _other = mailboxes(2, polls=1, device=device)
    with pytest.raises(ValueError, match=r"\(101, 3, 8\).* too large for mailboxes of 300 units of 96 bytes"):
        gather_heads(torch.ones(101, 3, 8, device=device), mine)
    with pytest.raises(ValueError, match=r"\(1, 2, 25\).* too large for mailboxes of 300 units of 96 bytes"):
        merge_ranks(torch.ones(1, 2, 25, device=device), torch.ones(1, 2, device=device), 1, mine)
    assert not mine.calls.any() and not mine.lost.any()


@pytest.mark.seeds(2)
@pytest.mark.parametrize("kernel", [gather_heads, lambda query, box: merge_ranks(query, query[..., 0].float(), 1, box)])
def test_a_launch_leaves_the_messages_of_the_one_before(draw: random.Random, device: str, kernel: Callable) -> None:
    """A rank that has stopped within a launch may find those of another size by then, but its own messages untouched."""
    memory, mine = mailboxes(1, polls=1, device=device)
    messages = memory[0, CHANNELS * 8 :]
    before: set[int] = set()
    for _ in range(6):
        messages.fill_(255)
        rows = draw.choice([1, 2, 112, 128, 129, 144, 192, 300])
        kernel(torch.rand(rows, 1, 8, device=device), mine)
        written = set((messages != 255).nonzero().flatten().tolist())
        assert len(written) >= rows * 8 and written.isdisjoint(before)
        before = written


def test_one_rank_alone(device: str) -> None:
    """A group of one: its own heads, and its own partials with what is empty set to 0."""
    _memory, mine = mailboxes(1, polls=1, device=device)
    query = torch.randn(3, 2, 8, device=device)
    out, lse = torch.randn(3, 2, 8, device=device), torch.zeros(3, 2, device=device)
    lse[1], out[1] = -torch.inf, torch.nan
    for _ in range(3):
        assert torch.equal(gather_heads(query, mine), query)
        torch.testing.assert_close(merge_ranks(out, lse, 2, mine), torch.where(out.isnan(), 0.0, out))
    assert mine.calls[:6].tolist() == [6] * 6 and not mine.calls[6:].any() and not mine.lost.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: ranks run on streams of one GPU")
@pytest.mark.seeds(4)
def test_ranks_on_streams_of_one_gpu(draw: random.Random) -> None:
    """Many rounds of several sizes without a wait in between, each rank delayed at random: nothing is read before it is
    there, nor replaced before it was read."""
    size, heads, latent, rounds = draw.choice([2, 3]), 4, 24, 200
    turns = [draw.choice([1, 8, 28, 48]) for _ in range(rounds)]
    outs = [torch.randn(size, rows, size * heads, latent, device="cuda") for rows in turns]
    lses = [torch.randn(size, rows, size * heads, device="cuda") for rows in turns]
    streams = [torch.cuda.Stream() for _ in range(size)]
    # What makes the device wait for all streams must happen before ranks wait for each other: loading kernels (here by
    # exchanges that give up at once), and taking memory, which the allocator keeps for each stream.
    torch.cuda._sleep(1)
    _hasty_memory, *hasty = mailboxes(size, polls=16, device="cuda")
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            held = [merge_ranks(out[rank], lse[rank], heads, hasty[rank]) for out, lse in zip(outs, lses)]
            del held
    _memory, *boxes = mailboxes(size, polls=16 * 10**5, device="cuda")
    got: list[list[torch.Tensor]] = [[] for _ in boxes]
    torch.cuda.synchronize()
    for turn in range(rounds):
        for rank, (box, stream) in enumerate(zip(boxes, streams)):
            with torch.cuda.stream(stream):
                if draw.random() < 0.3:
                    torch.cuda._sleep(draw.randrange(200_000))
                got[rank].append(merge_ranks(outs[turn][rank], lses[turn][rank], heads, box))
    torch.cuda.synchronize()
    for turn in range(rounds):
        want, _ = merge_partials(outs[turn], lses[turn])
        for rank in range(size):
            mine = want[:, rank * heads : (rank + 1) * heads]
            torch.testing.assert_close(got[rank][turn], mine, rtol=1e-5, atol=1e-5)
    assert not any(box.lost.any() for box in boxes)
