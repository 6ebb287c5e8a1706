# SPDX-License-Identifier: Apache-2.0
"""One generation on an engine: its requests' pages, lengths and pending rows, and the steps that move them forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import CapacityError

from ..parallel.failures import answering_ranks
from ..parallel.peers import check_answering

if TYPE_CHECKING:
    from ..lower import StepProgram
    from .engine import Engine


@dataclass(frozen=True)
class Requests:
    """What a step is told of its requests besides their rows, on one device.

    Attributes:
        lengths: committed tokens, int64 ``[B]``.
        accepted: rows of the last verify step that recurrent states have yet to take in, int32 ``[B]``.
        block_table: int32 ``[B, columns]``. state_slots: int32 ``[B]``.
    """

    lengths: Tensor
    accepted: Tensor
    block_table: Tensor
    state_slots: Tensor


class Session:
    """The requests of one generate() call. Use as a context manager; closing returns pages and state slots.

    Steps come from the host, which then knows every length (``decode``, ``verify`` and ``commit``), or, after ``go_ahead``,
    from the device, where the host learns lengths later (``verify_ahead``, ``commit_ahead`` and ``catch_up``).

    Attributes:
        lengths: committed tokens of every request, as far as the host knows.
        block_table: pages of every request, ``[B, columns]`` int32.
        taps_sink: called as ``(taps [T, taps], positions [B, S], block_table)`` with the hidden states of all committed
            rows, on an engine that returns them; positions of other rows are -1.
    """

    def __init__(self, engine: Engine, block_table: Tensor, pages: list[int], slots: list[int], room: int):
        """``room``: tokens the pages of each request are reserved for."""
        batch = len(slots)
        self.engine = engine
        self.lengths = [0] * batch
        self.block_table = block_table
        self.taps_sink: Callable[[Tensor, Tensor, Tensor], None] | None = None
        self._positions = self._taps = None  # of the last step
        self._pages, self._slots, self._room = pages, slots, room
        self._state_slots = torch.tensor(slots, dtype=torch.int32)
        self._accepted = [0] * batch
        self._verifying: list[int] | None = None
        self._is_ahead = False

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Return pages and state slots. Closing twice does nothing."""
        self.engine.pages.give_back(self._pages)
        self.engine.slots.give_back(self._slots)
        self._pages, self._slots = [], []

    @property
    def is_leader(self) -> bool:
        """Whether this rank decides sampled ids and stops, and streams."""
        return self.engine.parallel.is_leader

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The leader's value of ``tensor`` on every rank."""
        return self.engine.parallel.broadcast(tensor)

    def fetch(self, tensor: Tensor) -> Tensor:
        """``tensor`` on the CPU, which waits for the device.

        Raises:
            RankError: a rank did not answer in the steps before.
        """
        found = self.engine.parallel.fetch(tensor)
        check_answering(self.engine.parallel.dcp_group)
        return found

    def wait(self, arrived: torch.cuda.Event | None = None) -> None:
        """Wait for ``arrived``, or for all steps so far if other ranks take part in them.

        Whoever may read the device by other means than :meth:`fetch` calls this before: there, nothing limits the time.

        Raises:
            RankError: a rank did not answer in the steps before.
        """
        self.engine.parallel.wait(arrived)
        check_answering(self.engine.parallel.dcp_group)

    def prefill(self, prompts: Sequence[Tensor]) -> Tensor:
        """Process the prompts ``[len_b]``; returns logits after each prompt's last token, ``[B, V]`` float32.

        All requests advance together in chunks of ``prefill_chunk`` columns. Prompts are aligned at their ends, so the
        shorter ones have padded rows in the first chunks.

        Raises:
            CapacityError: a prompt is longer than what its request has reserved.
            ValueError: a prompt is missing or empty, or the session has tokens already.
        """
        prompts = [prompt.cpu() for prompt in prompts]
        self._check_step([len(prompt) for prompt in prompts])
        if any(self.lengths) or not all(len(prompt) for prompt in prompts):
            raise ValueError("prefill() starts a session with one prompt of at least one token per request")
        longest = max(len(prompt) for prompt in prompts)
        chunk = self.engine.config.prefill_chunk
        logits = None
        for start in range(0, longest, chunk):
            if start:
                self.wait()  # the inputs of a step that is no graph are copied behind the chunk before
            stop = min(start + chunk, longest)
            pieces = []
            for prompt in prompts:
                shift = longest - len(prompt)
                pieces.append(prompt[max(start - shift, 0) : max(stop - shift, 0)])
            logits = self._commit_step(pieces, stop - start)
        return logits

    def decode(self, tokens: Tensor, active: Sequence[bool]) -> Tensor:
        """Append one token to every active request; returns ``[B, V]`` float32 (zeros for the inactive ones).

        Raises:
            CapacityError: a request has used up what it reserved.
            ValueError: not one flag per request, or the previous verify was not committed.
        """
        tokens, counts = tokens.cpu(), [int(bool(is_active)) for is_active in active]
        self._check_step(counts)
        if any(self._accepted):
            logits = self.verify(tokens[:, None], counts)[:, 0]
            self.commit(counts)
        else:
            logits = self._commit_step([tokens[row : row + count] for row, count in enumerate(counts)], 1)
        if not all(counts):
            left_out = torch.tensor(counts).to(logits.device, non_blocking=True) == 0
            logits.masked_fill_(left_out[:, None], 0.0)
        return logits

    def verify(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """Run ``counts[b]`` tokens of each request without committing them; logits ``[B, S, V]`` float32.

        Args:
            tokens: ``[B, S]``; row b's first ``counts[b]`` columns are real, the others are ignored.

        Raises:
            CapacityError: the tokens do not fit into what a request has reserved, look-ahead included.
            ValueError: more rows than a verify step takes, not one count per request, or the previous verify was not
                committed.
        """
        rows = tokens.shape[1]
        if self.engine.verify is None or rows > self.engine.max_query_rows:
            raise ValueError(
                f"{rows} rows per request do not fit a verify step of at most {self.engine.max_query_rows}; "
                "call optimize() with a larger num_speculative_tokens"
            )
        self._check_step(counts)
        if max(counts) > rows:
            raise ValueError(f"{max(counts)} tokens of a request cannot be taken from {rows} columns")
        logits = self._verify(tokens.cpu(), torch.tensor(list(counts)), self._requests())
        self.engine.verify_steps += 1
        self._accepted = [0] * len(self.lengths)
        self._verifying = list(counts)
        return logits

    def commit(self, kept: Sequence[int]) -> None:
        """Keep the first ``kept[b]`` rows of the last verify step; the rest is overwritten by what comes next."""
        if self._verifying is None:
            raise ValueError("nothing to commit: call verify() first")
        if len(kept) != len(self._verifying):
            raise ValueError(f"{len(kept)} counts given for {len(self._verifying)} requests")
        for row, (keep, count) in enumerate(zip(kept, self._verifying)):
            if not 0 <= keep <= count:
                raise ValueError(f"request {row}: cannot keep {keep} of {count} verified rows")
        self._hand_over_taps(self.block_table, torch.tensor(list(kept)))
        self._accepted = list(kept)
        self.lengths = [length + keep for length, keep in zip(self.lengths, kept)]
        self._verifying = None

    def go_ahead(self) -> Requests:
        """The requests on the device, for the steps that follow; from here on the host's own steps are refused.

        Raises:
            ValueError: the previous verify was not committed, or the session is closed.
        """
        self._check_step([0] * len(self.lengths))
        self._is_ahead = True
        here = self._requests()
        return Requests(**{name: tensor.to(self.engine.device) for name, tensor in vars(here).items()})

    def verify_ahead(self, tokens: Tensor, counts: Tensor, requests: Requests) -> Tensor:
        """:meth:`verify` with all arguments on the device. Nothing waits for it, so nothing is checked.

        Args:
            tokens: int64 ``[B, S]``, S at most ``max_query_rows``. counts: int64 ``[B]``, at most what each request has
                reserved and not yet committed.
        """
        return self._verify(tokens, counts, requests)

    def commit_ahead(self, kept: Tensor, requests: Requests) -> Requests:
        """:meth:`commit` of the first ``kept[b]`` rows (int64, on the device) of the last step: the requests after it."""
        self._hand_over_taps(requests.block_table, kept)
        return replace(requests, lengths=requests.lengths + kept, accepted=kept.to(torch.int32))

    def catch_up(self, kept: Sequence[int]) -> None:
        """Tell the host what the next of the steps on the device has committed, once that step is known to be over."""
        self.engine.verify_steps += 1
        self.lengths = [length + keep for length, keep in zip(self.lengths, kept)]

    def _check_step(self, counts: Sequence[int]) -> None:
        """Refuse ``counts[b]`` more tokens per request where they cannot be taken, before anything changes."""
        if not self._slots:
            raise ValueError("the session is closed; open another one")
        if self._is_ahead:
            raise ValueError("the session has gone ahead: its lengths are on the device; use verify_ahead()")
        if self._verifying is not None:
            raise ValueError("the previous verify step was not committed; call commit() first")
        if len(counts) != len(self.lengths) or min(counts) < 0:
            raise ValueError(f"counts {list(counts)} are not one number of at least 0 for each of {len(self.lengths)} requests")
        for row, (length, count) in enumerate(zip(self.lengths, counts)):
            if count and length + count > self._room:
                raise CapacityError(
                    f"request {row} would hold {length + count} tokens, {self._room} are reserved; open the session with a "
                    "larger max_length"
                )

    def _commit_step(self, pieces: Sequence[Tensor], width: int) -> Tensor:
        """Append the pieces, aligned at the right edge of ``width`` columns; logits of the last column ``[B, V]``."""
        batch = len(pieces)
        tokens = torch.zeros(batch, width, dtype=torch.int64)
        positions = torch.full((batch, width), -1, dtype=torch.int64)
        for row, piece in enumerate(pieces):
            count = len(piece)
            if count:
                tokens[row, width - count :] = piece
                positions[row, width - count :] = torch.arange(self.lengths[row], self.lengths[row] + count)
        last_columns = torch.arange(width - 1, batch * width, width)
        logits = self._run(self.engine.step, tokens, positions, last_columns, self._requests())
        self._hand_over_taps(self.block_table)
        self.lengths = [length + len(piece) for length, piece in zip(self.lengths, pieces)]
        return logits

    def _requests(self) -> Requests:
        """The requests as the host knows them."""
        accepted = torch.tensor(self._accepted, dtype=torch.int32)
        return Requests(torch.tensor(self.lengths), accepted, self.block_table, self._state_slots)

    def _verify(self, tokens: Tensor, counts: Tensor, requests: Requests) -> Tensor:
        """A verify step of arguments on one device, the host's or the engine's."""
        column = torch.arange(tokens.shape[1], device=tokens.device)
        ignored = column >= counts[:, None]
        tokens = tokens.masked_fill(ignored, 0)  # what is ignored need not be a token id
        positions = (requests.lengths[:, None] + column).masked_fill(ignored, -1)
        every_row = torch.arange(tokens.numel(), device=tokens.device)
        return self._run(self.engine.verify, tokens, positions, every_row, requests).unflatten(0, tokens.shape)

    def _run(
        self, program: StepProgram, tokens: Tensor, positions: Tensor, logit_rows: Tensor, requests: Requests
    ) -> Tensor:
        inputs = {
            "input_ids": tokens.reshape(-1),
            "row_positions": positions.reshape(-1).clamp_min(0),
            "logit_rows": logit_rows,
            "positions": positions,
            "block_table": requests.block_table,
            "prefix_lengths": requests.lengths,
            "state_slots": requests.state_slots,
            "accepted": requests.accepted,
        }
        with answering_ranks("running a step"):
            logits, *taps = program(inputs)
        check_answering(self.engine.parallel.dcp_group)
        self._positions, self._taps = positions, taps[0] if taps else None
        # A replayed graph writes its next logits into the same memory.
        return logits.to(torch.float32, copy=True)

    def _hand_over_taps(self, block_table: Tensor, kept: Tensor | None = None) -> None:
        """Give the hidden states of the last step's rows, or of the first ``kept[b]`` of them, to the sink."""
        if self.taps_sink is None:
            return
        positions = self._positions
        if kept is not None:
            column = torch.arange(positions.shape[1], device=positions.device)
            positions = positions.masked_fill(column >= kept[:, None], -1)
        self.taps_sink(self._taps, positions, block_table)
