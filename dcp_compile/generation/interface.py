# SPDX-License-Identifier: Apache-2.0
"""What generation asks of a compiled model; ``runtime/engine.py`` and ``runtime/session.py`` implement it.

Rounds that run ahead (``ahead.py``) and DSpark drafts (``dspark.py``) need what only those have. A row is one sequence of
the batch. A session counts *committed* tokens per row: those whose KV entries and recurrent state are final. The newest
token of a row is never committed: it is fed by the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..runtime.costs import StepCosts


class Session(Protocol):
    """The pages and state slots of one batch, from prefill to the last token. A context manager: leaving it frees them.

    Attributes:
        is_leader: True on rank 0 of the group, which samples, decides when to stop and streams.
        lengths: committed tokens per row.
    """

    is_leader: bool
    lengths: list[int]

    def __enter__(self) -> Session: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def prefill(self, prompts: Sequence[Tensor]) -> Tensor:
        """Commit the prompts, one int64 ``[length]`` per row, unpadded.

        Returns the float32 logits ``[rows, vocab]`` after each prompt's last token.
        """
        ...

    def decode(self, tokens: Tensor, active: Sequence[bool]) -> Tensor:
        """Commit one token per active row, int64 ``[rows]``; returns float32 logits ``[rows, vocab]``.

        Logits of inactive rows mean nothing.
        """
        ...

    def verify(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """Run the first ``counts[row]`` columns of int64 ``tokens [rows, columns]`` after the committed tokens.

        Nothing is committed. Returns float32 logits ``[rows, columns, vocab]``, column j following token j; those of
        columns past ``counts`` mean nothing. A count of 0 leaves the row out.
        """
        ...

    def commit(self, kept: Sequence[int]) -> None:
        """Commit the first ``kept[row]`` tokens of the last verify step, ``0 <= kept[row] <= counts[row]``."""
        ...

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The leader's values on every rank, on the device of ``tensor``; shape and dtype are the same on all ranks."""
        ...

    def fetch(self, tensor: Tensor) -> Tensor:
        """``tensor`` on the CPU; an error if the device waits for a rank that is gone."""
        ...

    def wait(self, arrived: torch.cuda.Event | None = None) -> None:
        """Wait for ``arrived``, or for what other ranks take part in, with the same error. For reads by other means."""
        ...


class Engine(Protocol):
    """A compiled model, ready to open sessions.

    Attributes:
        vocab_size: columns of the logits.
        max_query_rows: tokens per row one verify step takes, anchor included; 1 means that drafts cannot be verified.
        verify_costs: times of verify steps if their lengths adapt to the drafts, None if drafts are verified whole.
    """

    vocab_size: int
    max_query_rows: int
    verify_costs: StepCosts | None

    def open(self, batch: int, max_length: int, given: Callable[[], Mapping[str, object]] = dict) -> Session:
        """Reserve a session for ``batch`` rows of at most ``max_length`` tokens each, prompt included.

        Room for the look-ahead of a verify step is added inside.

        Args:
            given: tells what else must be the same on all ranks, by name, if there are several.

        Raises:
            RankError: the ranks were given different things; nothing has changed.
            CapacityError: they do not fit; nothing has changed.
        """
        ...
