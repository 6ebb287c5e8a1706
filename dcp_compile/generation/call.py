# SPDX-License-Identifier: Apache-2.0
"""One generate() call: what transformers prepared for the decoding loop, in the loop's own terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation import BaseStreamer

from . import validate
from .drafts import Sampling
from .processors import is_context_free


class HeldStreamer(BaseStreamer):
    """Keeps back what generate() streams before the loop runs: an error must not leave a prompt in the caller's
    streamer, and only the leader streams."""

    def __init__(self, streamer: BaseStreamer) -> None:
        self._streamer = streamer
        self._held: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        self._held.append(value)

    def end(self) -> None:
        pass

    def release(self, is_leader: bool) -> BaseStreamer | None:
        """The caller's streamer, brought up to date; None on every rank but the leader."""
        if not is_leader:
            return None
        for value in self._held:
            self._streamer.put(value)
        return self._streamer


@dataclass(frozen=True)
class DecodeCall:
    """Attributes:
    input_ids: int64 ``[rows, columns]``, left padded; its device is that of everything the caller sees.
    prompts: the rows without padding, int64 ``[length]`` each.
    pads: padding columns per row.
    max_length: columns no row may exceed, padding included.
    pad_token: fills the columns of rows that have finished.
    eos_tokens: tokens that end a row.
    pads_finished: True if finished rows are padded; without an end-of-sequence criterion they go on until all have
        finished, as in transformers.
    scores, logits: whether the caller wants them per column.
    vocab_size: columns of the logits.
    """

    input_ids: Tensor
    prompts: list[Tensor]
    pads: list[int]
    max_length: int
    pad_token: int
    eos_tokens: frozenset[int]
    pads_finished: bool
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    do_sample: bool
    return_dict: bool
    scores: bool
    logits: bool
    streamer: HeldStreamer | None
    vocab_size: int

    @property
    def row_length(self) -> int:
        """Most tokens any row will hold, prompt included."""
        return self.max_length - min(self.pads)

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.do_sample, LogitsProcessorList(p for p in self.processors if is_context_free(p)))


def prepare(
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: HeldStreamer | None,
    model_kwargs: dict[str, Any],
    vocab_size: int,
) -> DecodeCall:
    """Collect the arguments of a transformers decoding method; raises GenerationError for what cannot be decoded."""
    validate.check_model_kwargs(model_kwargs)
    input_ids = input_ids.long()
    prompts, pads = validate.split_prompts(input_ids, model_kwargs.get("attention_mask"), vocab_size)
    eos_tokens = [c.eos_token_id.flatten().tolist() for c in criteria if type(c) is EosTokenCriteria]
    limits = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
    returns = bool(config.return_dict_in_generate)
    return DecodeCall(
        input_ids=input_ids,
        prompts=prompts,
        pads=pads,
        # A limit that the prompts exceed already ends a row after one token.
        max_length=max(min(limits, default=config.max_length), input_ids.shape[1] + 1),
        pad_token=0 if config._pad_token_tensor is None else int(config._pad_token_tensor),
        eos_tokens=frozenset().union(*eos_tokens),
        # The same test transformers uses.
        pads_finished=any(hasattr(c, "eos_token_id") for c in criteria),
        processors=processors,
        criteria=criteria,
        do_sample=bool(config.do_sample),
        return_dict=returns,
        scores=returns and bool(config.output_scores),
        logits=returns and bool(config.output_logits),
        streamer=streamer,
        vocab_size=vocab_size,
    )
