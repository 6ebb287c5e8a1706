# SPDX-License-Identifier: Apache-2.0
"""A DSpark draft at run time: its context cache and its block step.

The draft shares the target's block tables. A cache of latents is sharded as the target's: position p of a request has
the same page and slot in both. One of keys and values is whole on every rank (see replicated.py). Context
entries come from hidden states ("taps") of the target; the rows of a block are scratch, overwritten when their tokens are
accepted and masked by length otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..lower import StepProgram
from ..parallel import ParallelLayout
from ..parallel.failures import answering_ranks
from .costs import StepCosts


@dataclass(frozen=True)
class DraftEngine:
    """A compiled draft.

    Attributes:
        model: the draft (its projections of target states and its Markov head run uncompiled).
        block: program of one block step. caches: its KV cache per layer.
        block_size, dcp_rank, dcp_size, interleave: token layout of the caches; those of one rank if they are replicated.
        width: most tokens one block proposes.
        window: context tokens a block sees, the latest ones; None = all.
        gives_confidence: proposals come with the confidence head's opinion of them, for adaptive verification.
        costs: times of its blocks, measured for adaptive verification only.
    """

    model: torch.nn.Module
    block: StepProgram
    caches: list[Tensor]
    parallel: ParallelLayout
    block_size: int
    dcp_rank: int
    dcp_size: int
    interleave: int
    width: int
    window: int | None = None
    gives_confidence: bool = False
    costs: StepCosts | None = None

    @torch.no_grad()
    def ingest(self, taps: Tensor, positions: Tensor, block_table: Tensor) -> None:
        """Write the context entries of target rows.

        Args:
            taps: ``[T, taps]`` hidden states. positions: ``[B, S]``; rows at -1 (padding, rejected) are not written.
            block_table: ``[B, columns]``.
        """
        device = taps.device
        positions, block_table = positions.to(device), block_table.to(device)
        slots = torch.ops.dcp.cp_local_slot(
            positions, block_table, self.block_size, self.dcp_rank, self.dcp_size, self.interleave
        )
        context = self.model.project_context(taps[None])
        row_positions = positions.reshape(1, -1).clamp_min(0)
        for cache, pair in zip(self.caches, self.model.context_entries(context, row_positions)):
            # [1, groups, T, width] -> [T, groups * width]: latent and rope key, or keys and values.
            first, second = (entry[0].transpose(0, 1).flatten(1) for entry in pair)
            torch.ops.dcp.kv_write(first, second, cache, slots)

    @torch.no_grad()
    def run_block(
        self, anchors: Tensor, lengths: Sequence[int], block_table: Tensor, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Base logits ``[B, K, V]`` and hidden states ``[B, K, H]`` of one block per request, K the largest count.

        Args:
            anchors: ``[B]`` newest token of each request, at position ``lengths[b]``.
            lengths: context tokens per request. counts: rows wanted per request; 0 leaves it out.
        """
        rows = max(counts)
        ids = self.model.block_ids(anchors.cpu(), rows)
        column, context = torch.arange(rows), torch.tensor(list(lengths))
        positions = torch.where(column < torch.tensor(list(counts))[:, None], context[:, None] + column, -1)
        # With a window the compiled block sees nothing but what follows the prefix: the window and the block itself.
        prefix = context if self.window is None else (context - self.window).clamp_min(0)
        inputs = {
            "input_ids": ids.reshape(-1),
            "row_positions": positions.reshape(-1).clamp_min(0),
            "logit_rows": torch.arange(ids.numel()),
            "positions": positions,
            "block_table": block_table,
            "prefix_lengths": prefix,
            "state_slots": torch.full((len(ids),), -1, dtype=torch.int32),
            "accepted": torch.zeros(len(ids), dtype=torch.int32),
        }
        with answering_ranks("running a draft block"):
            logits, hidden = (output.unflatten(0, positions.shape) for output in self.block(inputs))
        return logits, hidden
