# SPDX-License-Identifier: Apache-2.0
"""An engine and a draft whose next token depends on the last one alone: exact distributions, and fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from dcp_compile.generation.drafts import Proposal


class MarkovEngine:
    """Logits are rows of ``table [vocab, vocab]``, by the last token."""

    max_query_rows = 8
    verify_costs = None

    def __init__(self, table) -> None:
        self.table = table
        self.vocab_size = len(table)
        self.drafted = self.accepted = 0

    def open(self, batch: int, max_length: int, given: Callable[[], Mapping[str, object]] = dict) -> MarkovSession:
        return MarkovSession(self, batch)


class MarkovSession:
    is_leader = True

    def __init__(self, engine: MarkovEngine, batch: int) -> None:
        self._engine = engine
        self.lengths = [0] * batch

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        pass

    def prefill(self, prompts):
        return self._engine.table[torch.stack([prompt[-1] for prompt in prompts])]

    def decode(self, tokens, active):
        return self._engine.table[tokens]

    def verify(self, tokens, counts):
        self._engine.drafted += sum(max(count - 1, 0) for count in counts)
        return self._engine.table[tokens]

    def commit(self, kept):
        self._engine.accepted += sum(max(count - 1, 0) for count in kept)

    def broadcast(self, tensor):
        return tensor

    fetch = broadcast

    def wait(self, arrived=None):
        pass


class MarkovDraft:
    """Draws from its own ``table [vocab, vocab]`` of logits, or takes the most likely token if ``one_hot``."""

    def __init__(self, table, one_hot: bool) -> None:
        self._table = table
        self._one_hot = one_hot

    def dcp_proposer(self):
        return self

    def begin(self, session, prompts, sampling):
        assert sampling.do_sample

    def propose(self, sequences, limits):
        last = torch.stack([sequence[-1] for sequence in sequences])
        tokens, probs = [], []
        for _ in range(max(limits)):
            probs.append(self._table[last].softmax(-1))
            last = probs[-1].argmax(-1) if self._one_hot else torch.multinomial(probs[-1], 1).squeeze(1)
            tokens.append(last)
        if not tokens:
            return Proposal(last[:, None][:, :0], limits)
        return Proposal(torch.stack(tokens, 1), limits, None if self._one_hot else torch.stack(probs, 1))

    def commit(self, kept):
        pass

    def close(self):
        pass
