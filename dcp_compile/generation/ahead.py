# SPDX-License-Identifier: Apache-2.0
"""Draft-and-verify without waiting: rounds follow one another on the device, and the host reads tokens one round late.

A round is a draft block, its verification and the verdict; all that the next one needs of it (newest tokens, lengths,
accepted rows) are tensors that never leave the device. While one round runs, the host publishes the tokens of the round
before. So whatever ends a row shows one round late, and what that round brings the row is dropped. Of ends the device
knows one only, the row's longest length: it feeds no token beyond.

Greedy tokens are those of the waiting loop. Sampled ones follow the same distribution, but random numbers are drawn for
whole drafts, and for a round that may be dropped at the end: the state of the generator after a call says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from ..runtime.draft import DraftEngine
from ..runtime.engine import Engine
from ..runtime.session import Session
from .call import DecodeCall
from .columns import Columns
from .dspark import DSparkProposer
from .loop import append_column, judge


def why_wait(engine: Engine, draft: DraftEngine, call: DecodeCall | None = None) -> str | None:
    """Why every round with ``draft`` must wait for the host; None where it need not.

    Args:
        call: None asks about the engine alone, whatever is called.
    """
    if engine.verify_costs is not None:
        return "how much of a draft is verified is decided there"
    if engine.reads_lengths:
        return "attention is planned there, by the lengths so far"
    if draft.reads_lengths:
        return "the draft's block is prepared there, by the lengths so far"
    if call is not None:
        if call.input_ids.device != engine.device:
            return "the caller works on another device"
        if not call.ragged:
            return "a logits processor reads tokens, and all rows at one length"
    return None


def decode_ahead(
    session: Session, call: DecodeCall, proposer: DSparkProposer, width: int, acceptance: str
) -> GenerateDecoderOnlyOutput | Tensor:
    """Decode with drafts of at most ``width`` tokens, all verified. For calls in which no round must wait (:func:`why_wait`).

    On a GPU nothing in a round waits, unless a processor does by itself. Stopping criteria other than the length and
    end-of-sequence tokens are evaluated where the caller works, which waits for the round that is running.
    """
    proposer.begin(session, call.prompts, call.sampling)
    columns = Columns(call, session)
    rows = range(len(call.prompts))
    append_column(session, call, columns, session.prefill(call.prompts), [True for _ in rows])
    columns.publish()
    rounds = Rounds(session, call, proposer, width, acceptance, columns.last())
    running: Round | None = None
    while not columns.finished:
        # The round that is running gives every row at least one token.
        wanted = [columns.runs(row) and columns.room(row) > (running is not None) for row in rows]
        following = rounds.launch(wanted) if any(wanted) else None
        if running is not None:
            session.wait(running.arrived)
            tokens, emitted = running.verdict[:, :-1], running.verdict[:, -1].tolist()
            session.catch_up(emitted)
            kept = [columns.until_end(tokens[row, : emitted[row]].tolist()) if columns.runs(row) else 0 for row in rows]
            columns.extend(tokens, kept, running.scores, running.logits)
            columns.publish()
        running = following
    session.wait()  # the caller need not know of a round that came too late
    return columns.result()


@dataclass(frozen=True)
class Round:
    """A round that was launched, and its verdict on the way to the host.

    Attributes:
        verdict: int64 ``[rows, K + 2]``: tokens, and in the last column how many of them the row emits.
        arrived: None where the verdict is on the host already.
        scores, logits: ``[rows, K + 1, vocab]`` if the caller wants them.
    """

    verdict: Tensor
    arrived: torch.cuda.Event | None
    scores: Tensor | None
    logits: Tensor | None


class Rounds:
    """What a round leaves to the next one, all on the device.

    Args:
        newest: each row's newest token, int64 ``[rows]``.
    """

    def __init__(
        self, session: Session, call: DecodeCall, proposer: DSparkProposer, width: int, acceptance: str, newest: Tensor
    ) -> None:
        self._session, self._call, self._proposer, self._acceptance = session, call, proposer, acceptance
        self._device = session.engine.device
        self._width = min(width, proposer.engine.width)
        self._requests = session.go_ahead()
        self._newest = newest.to(self._device)
        # A row's last token is never fed.
        self._limits = torch.tensor([call.max_length - pad - 1 for pad in call.pads], device=self._device)
        self._wanted: list[bool] = []

    def launch(self, wanted: list[bool]) -> Round:
        """Start the next round for the rows wanted, without waiting for the rounds before it."""
        on_gpu = self._device.type == "cuda"
        if wanted != self._wanted:
            flags = torch.tensor(wanted, pin_memory=on_gpu)
            self._wanted, self._flags = wanted, flags.to(self._device, non_blocking=True)
        verdict, scores, logits = self.run(self._flags)
        sent = torch.empty(verdict.shape, dtype=verdict.dtype, pin_memory=on_gpu)
        sent.copy_(verdict, non_blocking=True)
        arrived = torch.cuda.Event() if on_gpu else None
        if arrived is not None:
            arrived.record(torch.cuda.current_stream(self._device))
        keeps = self._call.scores or self._call.logits
        return Round(sent, arrived, *((scores, logits) if keeps else (None, None)))

    def run(self, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The next round of the rows ``wanted [rows]``: verdict, scores and logits as :class:`Round` has them."""
        session, call, requests, newest = self._session, self._call, self._requests, self._newest
        room = (self._limits - requests.lengths).clamp(0, self._width + 1)
        fed = room * wanted
        counts = (fed - 1).clamp_min(0)
        drafts, probs, _ = self._proposer.draw(newest, requests.lengths, requests.block_table, counts, self._width)
        drafts = session.broadcast(drafts)

        logits = session.verify_ahead(torch.cat([newest[:, None], drafts], dim=1), fed, requests)
        unused = torch.arange(self._width + 1, device=self._device) >= fed[:, None]
        logits.masked_fill_(unused[..., None], 0.0)
        scores = call.processors(None, logits.flatten(0, 1)).view(logits.shape)
        verdict = judge(session, call, scores, drafts, counts, probs, self._acceptance)

        emitted = verdict[:, -1] * (fed > 0)
        last = verdict.gather(1, (emitted - 1).clamp_min(0)[:, None]).squeeze(1)
        self._newest = torch.where(emitted > 0, last, newest)
        self._requests = session.commit_ahead(emitted, requests)
        return torch.cat([verdict[:, :-1], emitted[:, None]], dim=1), scores, logits
