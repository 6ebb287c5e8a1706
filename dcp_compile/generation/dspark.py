# SPDX-License-Identifier: Apache-2.0
"""Drafting with a compiled DSpark draft: one block step, then the Markov head token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..runtime.draft import DraftEngine
from ..runtime.session import Session
from .drafts import Proposal, Sampling


class DSparkProposer:
    """Proposes from the draft; the session feeds it the target's hidden states.

    Row j of the block predicts the token after it: its logits are the block's plus a bias from the token drawn by row
    j - 1 (the anchor for row 0). All tokens of a proposal are therefore drawn one after another, from one block step.
    """

    def __init__(self, engine: DraftEngine) -> None:
        self._engine = engine

    def begin(self, session: Session, prompts: Sequence[Tensor], sampling: Sampling) -> None:
        self._session, self._sampling = session, sampling
        session.taps_sink = self._engine.ingest

    def propose(self, sequences: Sequence[Tensor], limits: Sequence[int]) -> Proposal:
        counts = [min(limit, self._engine.width) for limit in limits]
        if not any(counts):
            empty = [torch.empty(0, dtype=torch.int64) for _ in counts]
            return Proposal.stack(empty)
        anchors = torch.stack([sequence[-1] for sequence in sequences])
        base, hidden = self._engine.run_block(anchors, self._session.lengths, self._session.block_table, counts)
        tokens, probabilities = [], []
        previous = anchors.to(base.device)
        for row in range(base.shape[1]):
            logits = base[:, row] + self._engine.model.markov_bias(previous)
            previous, drawn_from = self._sampling.pick(logits)
            tokens.append(previous)
            probabilities.append(drawn_from)
        sampled = probabilities[0] is not None
        return Proposal(
            torch.stack(tokens, dim=1),
            counts,
            torch.stack(probabilities, dim=1) if sampled else None,
            self._confidences(hidden, [anchors.to(base.device), *tokens[:-1]]),
        )

    def _confidences(self, hidden: Tensor, before: list[Tensor]) -> Tensor | None:
        """Chances ``[B, K]`` of the drafts, from the block's states ``[B, K, H]`` and the tokens before each of them."""
        if not self._engine.gives_confidence:
            return None
        with torch.no_grad():
            return self._engine.model.confidence(hidden, torch.stack(before, dim=1))

    def commit(self, kept: Sequence[int]) -> None:
        """The session has handed the kept rows' hidden states to the draft already."""

    def close(self) -> None:
        self._session.taps_sink = None
