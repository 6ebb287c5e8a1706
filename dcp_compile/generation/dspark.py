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
        self.engine = engine

    def begin(self, session: Session, prompts: Sequence[Tensor], sampling: Sampling) -> None:
        self._session, self._sampling = session, sampling
        session.taps_sink = self.engine.ingest

    @torch.no_grad()
    def propose(self, sequences: Sequence[Tensor], limits: Sequence[int]) -> Proposal:
        counts = [min(limit, self.engine.width) for limit in limits]
        if not any(counts):
            empty = [torch.empty(0, dtype=torch.int64) for _ in counts]
            return Proposal.stack(empty)
        anchors, lengths = torch.stack([sequence[-1] for sequence in sequences]), torch.tensor(self._session.lengths)
        block_table = self._session.block_table
        tokens, probabilities, hidden = self.draw(anchors, lengths, block_table, torch.tensor(counts), max(counts))
        return Proposal(tokens, counts, probabilities, self._confidences(hidden, anchors, tokens))

    @torch.no_grad()
    def draw(
        self, anchors: Tensor, lengths: Tensor, block_table: Tensor, counts: Tensor, width: int
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """One block per row, from arguments as for :meth:`DraftEngine.run_block`.

        Returns, on the device, the tokens ``[B, width]``, the distributions they were drawn from, ``[B, width, vocab]`` or
        None, and the block's states ``[B, width, H]``.
        """
        base, hidden = self.engine.run_block(anchors, lengths, block_table, counts, width)
        if not self._sampling.do_sample:
            return self.engine.follow(anchors, base), None, hidden
        return *self._draw(anchors.to(base.device, non_blocking=True), base), hidden

    def _draw(self, anchors: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
        """Sampled tokens ``[B, K]`` and the distributions they were drawn from, ``[B, K, vocab]``."""
        tokens, probabilities = [anchors], []
        for logits in base.unbind(1):
            drawn, drawn_from = self._sampling.pick(logits + self.engine.model.markov_bias(tokens[-1]))
            tokens.append(drawn)
            probabilities.append(drawn_from)
        return torch.stack(tokens[1:], dim=1), torch.stack(probabilities, dim=1)

    def _confidences(self, hidden: Tensor, anchors: Tensor, tokens: Tensor) -> Tensor | None:
        """Chances ``[B, K]`` of the drafts, from the block's states ``[B, K, H]`` and the tokens before each of them."""
        if not self.engine.gives_confidence:
            return None
        before = torch.cat([anchors.to(tokens.device, non_blocking=True)[:, None], tokens[:, :-1]], dim=1)
        return self.engine.model.confidence(hidden, before)

    def commit(self, kept: Sequence[int]) -> None:
        """The session has handed the kept rows' hidden states to the draft already."""

    def close(self) -> None:
        self._session.taps_sink = None
