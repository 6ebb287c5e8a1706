# SPDX-License-Identifier: Apache-2.0
"""The sequences of one generate() call, ragged inside and column by column for the caller.

Rows grow at their own pace. A column is *published* once every row that takes part has a token for it: stopping
criteria and the streamer then see exactly the calls that lock-step decoding makes, whatever the rows hold beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from .._compat import CACHE_NAME
from .call import DecodeCall
from .interface import Session


class Columns:
    """Attributes:
    width: published columns, prompt and padding included.
    lengths: columns each row holds, at least ``width`` for rows that take part.
    unfinished: rows no criterion has stopped.
    """

    def __init__(self, call: DecodeCall, session: Session) -> None:
        rows, self.width = call.input_ids.shape
        self._call = call
        self._session = session
        self._streamer = call.streamer.release(session.is_leader) if call.streamer is not None else None
        self._ids = call.input_ids.new_full((rows, call.max_length), call.pad_token)
        self._ids[:, : self.width] = call.input_ids
        self._host = self._ids.cpu()  # the same tensor if the caller works on the CPU
        self.lengths = [self.width] * rows
        self.unfinished = [True] * rows
        self._scores: tuple[Tensor, ...] | None = () if call.scores else None
        self._logits: tuple[Tensor, ...] | None = () if call.logits else None
        self._ahead: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(rows)]  # scores, logits past `width`

    @property
    def ids(self) -> Tensor:
        """The published sequences, ``[rows, width]``."""
        return self._ids[:, : self.width].contiguous()

    @property
    def finished(self) -> bool:
        return not any(self.unfinished)

    def takes_part(self, row: int) -> bool:
        """True if the next columns need tokens of this row."""
        return self.unfinished[row] or not self._call.pads_finished

    def runs(self, row: int) -> bool:
        """True if the row can take another token: it takes part, and what it holds already does not end it."""
        length = self.lengths[row]
        ended = length > self.width and int(self._host[row, length - 1]) in self._call.eos_tokens
        return self.takes_part(row) and not ended and self.room(row) > 0

    def room(self, row: int) -> int:
        """Tokens the row can still take."""
        return self._call.max_length - self.lengths[row]

    def sequences(self) -> list[Tensor]:
        """All tokens of each row without padding, int64 ``[length]`` on the CPU."""
        return [self._host[row, pad:length] for row, (pad, length) in enumerate(zip(self._call.pads, self.lengths))]

    def last(self) -> Tensor:
        """Each row's newest token, int64 ``[rows]`` on the CPU."""
        return self._host.gather(1, torch.tensor(self.lengths)[:, None] - 1).squeeze(1)

    def until_end(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens`` a row can take: up to and including the first that ends it."""
        return next((i + 1 for i, token in enumerate(tokens) if token in self._call.eos_tokens), len(tokens))

    def extend(self, tokens: Tensor, counts: Sequence[int], scores: Tensor | None, logits: Tensor | None) -> None:
        """Append the first ``counts[row]`` of ``tokens [rows, columns]``, which are on the CPU.

        ``scores`` and ``logits`` are those they were chosen from, ``[rows, columns, vocab]``; without them if the caller
        wants neither.
        """
        for row, count in enumerate(counts):
            start = self.lengths[row]
            self._host[row, start : start + count] = tokens[row, :count]
            if self._ids is not self._host:
                self._ids[row, start : start + count].copy_(tokens[row, :count], non_blocking=True)
            self.lengths[row] += count
            if self._scores is not None or self._logits is not None:
                self._ahead[row] += [(scores[row, j], logits[row, j]) for j in range(count)]

    def publish(self) -> None:
        """Show the caller every complete column; stops where all rows have finished."""
        while not self.finished and all(
            length > self.width for row, length in enumerate(self.lengths) if self.takes_part(row)
        ):
            self._publish_column()
        if self.finished and self._streamer is not None:
            self._streamer.end()

    def result(self) -> GenerateDecoderOnlyOutput | Tensor:
        """What generate() returns."""
        sequences = self.ids.clone()
        if not self._call.return_dict:
            return sequences
        kept = {"scores": self._scores, "logits": self._logits, CACHE_NAME: None}
        return GenerateDecoderOnlyOutput(sequences=sequences, **kept)

    def _publish_column(self) -> None:
        call, column = self._call, self.width
        for row in range(len(self.lengths)):
            if not self.takes_part(row):
                self._ids[row, column] = self._host[row, column] = call.pad_token
                self.lengths[row] = column + 1
        self.width += 1
        self._keep_scores()
        for row, stopped in enumerate(self._stops()):
            if stopped and self.unfinished[row]:
                self.unfinished[row] = False
                if call.pads_finished:  # what the row holds beyond this column was never part of the answer
                    self.lengths[row] = self.width
                    self._ahead[row].clear()
        if self._streamer is not None:
            self._streamer.put(self._host[:, column].clone())

    def _stops(self) -> list[int]:
        if self._call.stops_by_tokens:
            return self._call.criteria(self._host[:, : self.width], self._scores).tolist()
        self._session.wait()  # criteria read what they like
        stop = self._call.criteria(self.ids, self._scores)
        return self._session.fetch(self._session.broadcast(stop.long())).tolist()  # a clock may decide: the leader's counts

    def _keep_scores(self) -> None:
        if self._scores is None and self._logits is None:
            return
        pairs = [ahead.pop(0) if ahead else None for ahead in self._ahead]
        blank = next(torch.zeros_like(pair[0]) for pair in pairs if pair is not None)
        if self._scores is not None:
            self._scores += (torch.stack([blank if pair is None else pair[0] for pair in pairs]),)
        if self._logits is not None:
            self._logits += (torch.stack([blank if pair is None else pair[1] for pair in pairs]),)
