# SPDX-License-Identifier: Apache-2.0
"""Where draft tokens come from: n-gram lookup, any causal LM, or an object that brings its own proposer.

``assistant_model`` may be any object with a method ``dcp_proposer() -> Proposer``; it is called once per generate()
call. The order of calls is fixed: ``begin``, the session's prefill, then ``propose``, verify, ``commit`` in turn, at
last ``close``. A proposer decides how fast tokens come, never which: acceptance keeps the target's distribution.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList
from transformers.cache_utils import DynamicLayer

from .. import _compat
from .interface import Session


@dataclass(frozen=True)
class Sampling:
    """How the caller wants tokens chosen, as far as a draft can follow it.

    Attributes:
        do_sample: draw tokens; False takes the argmax.
        warpers: the caller's processors that read nothing but the scores (temperature, top-k, top-p, ...).
    """

    do_sample: bool
    warpers: LogitsProcessorList

    def pick(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Choose one token per row of ``logits [rows, vocab]``.

        Returns int64 tokens ``[rows]`` and the float32 distribution ``[rows, vocab]`` they were drawn from (None for
        argmax).
        """
        if not self.do_sample:
            return logits.argmax(dim=-1), None
        probs = self.warpers(None, logits.float()).softmax(dim=-1)
        return torch.multinomial(probs, num_samples=1).squeeze(1), probs


@dataclass(frozen=True)
class Proposal:
    """Draft tokens for each row.

    Attributes:
        tokens: int64 ``[rows, width]``.
        counts: real draft tokens per row, at most the row's limit.
        probs: float32 ``[rows, width, vocab]``, what each token was drawn from; None for tokens that were not drawn.
        confidences: float32 ``[rows, width]``, the draft's own estimate that a token is accepted if all before it are,
            made before that token was chosen; None if it makes none.
    """

    tokens: Tensor
    counts: list[int]
    probs: Tensor | None = None
    confidences: Tensor | None = None

    @staticmethod
    def stack(tokens: Sequence[Tensor], probs: Sequence[Tensor] | None = None) -> Proposal:
        """A proposal from one int64 ``[count]`` per row and, if drawn, one ``[count, vocab]`` per row."""
        counts = [len(row) for row in tokens]
        padded = torch.nn.utils.rnn.pad_sequence(list(tokens), batch_first=True)
        if probs is not None:
            probs = torch.nn.utils.rnn.pad_sequence(list(probs), batch_first=True)
        return Proposal(padded, counts, probs)


class Proposer(Protocol):
    """Draft tokens for the rows of one generate() call."""

    def begin(self, session: Session, prompts: Sequence[Tensor], sampling: Sampling) -> None:
        """Prepare for ``prompts``, one int64 ``[length]`` per row; the session has not run them yet."""
        ...

    def propose(self, sequences: Sequence[Tensor], limits: Sequence[int]) -> Proposal:
        """Draft what follows ``sequences``: all tokens of each row, int64 ``[length]`` on the CPU.

        The last token of each is the one not committed yet. At most ``limits[row]`` tokens per row; a limit of 0 also
        stands for a row that has finished.
        """
        ...

    def commit(self, kept: Sequence[int]) -> None:
        """The session has committed the first ``kept[row]`` tokens of [last token, drafts]; 0 for rows left out."""
        ...

    def close(self) -> None:
        """Free what the proposer holds."""
        ...


class PromptLookup:
    """Copies what followed the latest earlier occurrence of a row's last tokens.

    Args:
        max_ngram: longest tail that is looked up; shorter tails are tried after it.
    """

    def __init__(self, max_ngram: int) -> None:
        self._max_ngram = max_ngram

    def begin(self, session: Session, prompts: Sequence[Tensor], sampling: Sampling) -> None:
        pass

    def propose(self, sequences: Sequence[Tensor], limits: Sequence[int]) -> Proposal:
        return Proposal.stack([self._follow(*pair) for pair in zip(sequences, limits, strict=True)])

    def commit(self, kept: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass

    def _follow(self, sequence: Tensor, limit: int) -> Tensor:
        if limit:
            for size in range(min(self._max_ngram, len(sequence) - 1), 0, -1):
                earlier = sequence[:-1].unfold(0, size, 1)
                starts = (earlier == sequence[-size:]).all(dim=1).nonzero().squeeze(1) + size
                if len(starts):
                    whole = starts[starts + limit <= len(sequence)]
                    # A periodic text matches close to its end: the first match has the longest continuation.
                    start = int(whole[-1] if len(whole) else starts[0])
                    return sequence[start : start + limit]
        return sequence[:0]


class CausalLMProposer:
    """Drafts with a Hugging Face causal LM of the same vocabulary, row by row, keeping a cache of each row.

    The kept caches hold committed tokens only: a draft is rolled back by cropping a cache that is all softmax
    attention, and by drafting on a copy of any other (a recurrent state cannot be rolled back).
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache_argument = _compat.cache_argument(model)
        parameters = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def begin(self, session: Session, prompts: Sequence[Tensor], sampling: Sampling) -> None:
        config = self._model.config.get_text_config(decoder=True)
        self._caches = [DynamicCache(config=config) for _ in prompts]
        self._held = [0] * len(prompts)
        self._sampling = sampling

    def propose(self, sequences: Sequence[Tensor], limits: Sequence[int]) -> Proposal:
        drafts = [self._draft(row, sequences[row], limit) for row, limit in enumerate(limits)]
        tokens = [tokens for tokens, _ in drafts]
        return Proposal.stack(tokens, [probs for _, probs in drafts] if self._sampling.do_sample else None)

    def commit(self, kept: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        self._caches = []

    def _draft(self, row: int, sequence: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        """Tokens ``[limit]`` and the distributions they were drawn from, ``[limit, vocab]`` (no rows for argmax)."""
        vocab = self._model.config.get_text_config(decoder=True).vocab_size
        device = self._model.device
        tokens = torch.empty(0, dtype=torch.int64, device=device)
        probs = torch.empty(0, vocab, device=device)
        if not limit:
            return tokens, probs
        cache = self._caches[row]
        logits = self._forward(cache, sequence[self._held[row] :].to(device))
        self._held[row] = len(sequence)
        rewinds = all(type(layer) is DynamicLayer for layer in cache.layers)
        if limit > 1 and not rewinds:
            cache = copy.deepcopy(cache)
        for step in range(limit):
            if step:
                logits = self._forward(cache, tokens[-1:])
            token, distribution = self._sampling.pick(logits)
            tokens = torch.cat([tokens, token])
            if distribution is not None:
                probs = torch.cat([probs, distribution])
        if limit > 1 and rewinds:
            cache.crop(1 - limit)
        return tokens, probs

    def _forward(self, cache: DynamicCache, tokens: Tensor) -> Tensor:
        """Logits ``[1, vocab]`` after ``tokens [count]``, which the cache takes in."""
        arguments = {self._cache_argument: cache, "use_cache": True, **self._last_only}
        return self._model(input_ids=tokens[None], **arguments).logits[:, -1].float()
