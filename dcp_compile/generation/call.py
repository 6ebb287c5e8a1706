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
    TextStreamer,
)
from transformers.generation import BaseStreamer

from ..errors import GenerationError
from ..parallel.agreement import prompts_fingerprint
from . import validate
from .drafts import Sampling
from .processors import is_context_free


class HeldStreamer(BaseStreamer):
    """Keeps back what generate() streams before the loop runs: an error must not leave a prompt in the caller's
    streamer, and only the leader streams."""

    def __init__(self, streamer: BaseStreamer) -> None:
        self._streamer = streamer
        self._held: list[Tensor] = []

    def check_rows(self, rows: int) -> None:
        """GenerationError, on every rank, where the streamer would raise on the leader alone."""
        if rows > 1 and type(self._streamer).put is TextStreamer.put:
            raise GenerationError(
                f"a {type(self._streamer).__name__} shows one sequence, but the call has {rows}; leave streamer out, or call "
                "generate() once per prompt"
            )

    def put(self, value: Tensor) -> None:
        self._held.append(value)

    def end(self) -> None:
        pass

    def release(self, is_leader: bool) -> BaseStreamer:
        """The caller's streamer, brought up to date; on other ranks than the leader one that only tells it of the end."""
        if not is_leader:
            return _EndingStreamer(self._streamer)
        for value in self._held:
            self._streamer.put(value)
        return self._streamer


class _EndingStreamer(BaseStreamer):
    """Ends another streamer, for which a thread may be waiting, but for one that would print an empty line then."""

    def __init__(self, streamer: BaseStreamer) -> None:
        self._streamer = streamer

    def put(self, value: Tensor) -> None:
        pass

    def end(self) -> None:
        if getattr(type(self._streamer), "on_finalized_text", None) is not TextStreamer.on_finalized_text:
            self._streamer.end()


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

    def given(self) -> dict[str, object]:
        """What ranks compare: which steps they run depends on it. Of processors and criteria the leader's count."""
        return {
            **prompts_fingerprint(self.prompts),
            "max_length": self.max_length,
            "eos_token_id": sorted(self.eos_tokens),
            "pad_token_id": self.pad_token if self.pads_finished else None,
            "do_sample": self.do_sample,
            "output_scores or output_logits": self.scores or self.logits,
            "criteria that do more than compare tokens": not self.stops_by_tokens,
        }

    @property
    def ragged(self) -> bool:
        """Whether rows may advance independently: no processor looks at other tokens than those it scores."""
        return all(is_context_free(processor) for processor in self.processors)

    @property
    def stops_by_tokens(self) -> bool:
        """Whether the criteria follow from the tokens alone: then every rank decides for itself, on the host."""
        return all(type(criterion) in (EosTokenCriteria, MaxLengthCriteria) for criterion in self.criteria)

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
    if streamer is not None:
        streamer.check_rows(len(input_ids))
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
