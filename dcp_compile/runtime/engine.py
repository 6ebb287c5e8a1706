# SPDX-License-Identifier: Apache-2.0
"""The engine: compiled step programs, the state they write to, and who may use which part of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache import PagePool, SlotPool
from ..capture import StateRef
from ..config import DCPConfig
from ..errors import CapacityError
from ..layout import pages_needed
from ..lower import StepProgram
from ..parallel import ParallelLayout
from ..parallel.agreement import check_agreement
from .costs import StepCosts
from .session import Session


@dataclass
class Engine:
    """Everything a generation needs.

    Attributes:
        step: program that commits every row. verify: program that leaves its rows pending, None without speculation.
        states: KV caches and recurrent states by layer.
        verify_steps: verify steps so far, over all sessions; rounds that were dropped at the end of a call do not count.
        verify_costs: times of verify steps, measured for adaptive verification only.
        reads_lengths: the programs read lengths on the host, to plan their attention.
        vocab_size: of the logits. tap_layers: layers whose hidden states the programs return for a draft.
    """

    config: DCPConfig
    parallel: ParallelLayout
    step: StepProgram
    verify: StepProgram | None
    states: Mapping[StateRef, Tensor]
    vocab_size: int
    device: torch.device
    pages: PagePool
    slots: SlotPool
    reads_lengths: bool = False
    tap_layers: tuple[int, ...] = ()
    verify_steps: int = 0
    verify_costs: StepCosts | None = None

    @property
    def max_query_rows(self) -> int:
        """Most rows per request that one verify step takes."""
        return self.config.num_speculative_tokens + 1 if self.verify is not None else 1

    @property
    def columns(self) -> int:
        """Width of a block table."""
        return table_columns(self.config, self.parallel.dcp_size)

    def open(self, batch: int, max_length: int, given: Callable[[], Mapping[str, object]] = dict) -> Session:
        """Reserve pages and state slots for ``batch`` requests of up to ``max_length`` tokens each.

        Args:
            given: tells what else must be the same on all ranks, by name, if there are several.

        Raises:
            RankError: the ranks were given different things. Nothing is reserved then.
            CapacityError: over max_batch_size or max_seq_len, or the pools are in use. Nothing is reserved then.
        """
        if self.parallel.replica is not None:
            check_agreement(self.parallel.replica, {**given(), "requests": batch, "tokens per request": max_length})
        self.check_room(batch, max_length)
        room = max_length + self.max_query_rows - 1
        each = pages_needed(room, self.config.block_size, self.parallel.dcp_size)
        if self.slots.available < batch:
            self.slots.take(batch)  # raises, naming the free count
        pages = self.pages.take(batch * each)
        slots = self.slots.take(batch)
        try:
            self._reset(slots)
        except BaseException:
            self.pages.give_back(pages)
            self.slots.give_back(slots)
            raise
        table = torch.zeros(batch, self.columns, dtype=torch.int32)
        table[:, :each] = torch.tensor(pages, dtype=torch.int32).view(batch, each)
        return Session(self, table, pages, slots, room)

    def check_room(self, batch: int, max_length: int) -> None:
        """Raises CapacityError where no pool could ever hold ``batch`` requests of ``max_length`` tokens."""
        config = self.config
        if not 1 <= batch <= config.max_batch_size:
            raise CapacityError(
                f"a batch of {batch} does not fit: max_batch_size is {config.max_batch_size}; "
                "call optimize() with a larger max_batch_size, or split the batch"
            )
        if max_length < 1:
            raise CapacityError(f"max_length={max_length} must be at least 1")
        if max_length > config.max_seq_len:
            raise CapacityError(
                f"{max_length} tokens (prompt and new tokens) do not fit: max_seq_len is {config.max_seq_len}; "
                "call optimize() with a larger max_seq_len, or ask for fewer new tokens"
            )

    def _reset(self, slots: list[int]) -> None:
        """A new sequence starts from zero recurrent state."""
        index = torch.tensor(slots, device=self.device)
        for ref, tensor in self.states.items():
            if ref.kind in ("state", "conv_state"):
                tensor[index] = 0


def table_columns(config: DCPConfig, dcp_size: int) -> int:
    """Block-table columns of the longest request, speculative look-ahead included."""
    return pages_needed(config.max_seq_len + config.num_speculative_tokens, config.block_size, dcp_size)
