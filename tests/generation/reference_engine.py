# SPDX-License-Identifier: Apache-2.0
"""The engine interface over a plain Hugging Face model: one DynamicCache per row, rollback by replay."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from dcp_compile.errors import CapacityError


class ReferenceEngine:
    """Counts what it is asked to do; ``max_length`` and ``max_batch`` are its capacity."""

    def __init__(self, model, max_query_rows: int = 8, max_length: int = 256, max_batch: int = 64) -> None:
        self.model = model
        self.vocab_size = model.config.get_text_config().vocab_size
        self.max_query_rows = max_query_rows
        self.verify_costs = None
        self.max_length = max_length
        self.max_batch = max_batch
        self.opened = self.closed = 0
        self.steps = 0  # decode and verify calls
        self.fed = 0  # tokens fed by them
        self.drafted = self.accepted = 0
        self.longest = 0  # tokens any row held, drafts included

    def open(self, batch: int, max_length: int, given: Callable[[], Mapping[str, object]] = dict) -> ReferenceSession:
        if batch > self.max_batch or max_length > self.max_length:
            raise CapacityError(
                f"{batch} rows of {max_length} tokens; the limit is {self.max_batch} of {self.max_length}"
            )
        self.opened += 1
        return ReferenceSession(self, batch, max_length)


class ReferenceSession:
    is_leader = True

    def __init__(self, engine: ReferenceEngine, batch: int, max_length: int) -> None:
        self._engine = engine
        self._limit = max_length
        self._caches = [DynamicCache(config=engine.model.config.get_text_config()) for _ in range(batch)]
        self.lengths = [0] * batch
        parameters = inspect.signature(type(engine.model).forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._pending = None

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._engine.closed += 1
        self._caches = None

    def prefill(self, prompts: Sequence[Tensor]) -> Tensor:
        assert len(prompts) == len(self.lengths) and not any(self.lengths)
        assert all(len(prompt) > 0 for prompt in prompts)
        return torch.stack([self._run(row, prompt)[-1] for row, prompt in enumerate(prompts)])

    def decode(self, tokens: Tensor, active: Sequence[bool]) -> Tensor:
        assert tokens.shape == (len(self.lengths),) and any(active) and self._pending is None
        self._engine.steps += 1
        logits = torch.full((len(active), self._engine.vocab_size), torch.nan)
        for row, runs in enumerate(active):
            if runs:
                self._engine.fed += 1
                logits[row] = self._run(row, tokens[row, None])[-1]
        return logits

    def verify(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        assert self._pending is None, "the previous verify was not committed"
        assert any(counts) and max(counts) <= min(self._engine.max_query_rows, tokens.shape[1])
        self._engine.steps += 1
        self._engine.fed += sum(counts)
        self._engine.drafted += sum(max(count - 1, 0) for count in counts)
        logits = torch.full((*tokens.shape, self._engine.vocab_size), torch.nan)
        before = [copy.deepcopy(cache) if count else None for cache, count in zip(self._caches, counts)]
        lengths = list(self.lengths)
        for row, count in enumerate(counts):
            if count:
                logits[row, :count] = self._run(row, tokens[row, :count])
        self.lengths = lengths
        self._pending = (before, tokens.clone(), list(counts))
        return logits

    def commit(self, kept: Sequence[int]) -> None:
        before, tokens, counts = self._pending
        self._pending = None
        assert len(kept) == len(counts)
        for row, (keep, count) in enumerate(zip(kept, counts)):
            assert 0 <= keep <= count and (keep > 0) == (count > 0)
            self._engine.accepted += max(keep - 1, 0)
            if keep == count:
                self.lengths[row] += keep
            else:
                self._caches[row] = before[row]
                self._run(row, tokens[row, :keep])

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor

    def fetch(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()

    def wait(self, arrived: object = None) -> None:
        """Everything is on the CPU."""

    def _run(self, row: int, tokens: Tensor) -> Tensor:
        arguments = {self._cache_name: self._caches[row], "use_cache": True}
        with torch.no_grad():
            logits = self._engine.model(input_ids=tokens[None], **arguments).logits[0].float()
        self.lengths[row] += len(tokens)
        self._engine.longest = max(self._engine.longest, self.lengths[row])
        assert self.lengths[row] <= self._limit, "a row outgrew what the session was opened for"
        return logits
