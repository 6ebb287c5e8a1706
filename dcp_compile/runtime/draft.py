# SPDX-License-Identifier: Apache-2.0
"""A DSpark draft at run time: its context cache and its block step.

The draft shares the target's block tables. A cache of latents is sharded as the target's: position p of a request has
the same page and slot in both. One of keys and values is whole on every rank (see replicated.py). Context
entries come from hidden states ("taps") of the target; the rows of a block are scratch, overwritten when their tokens are
accepted and masked by length otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..lower import StepProgram
from ..parallel import ParallelLayout
from ..parallel.failures import answering_ranks
from ..places import Places
from .costs import StepCosts
from .graphs import ReplayedCall, buckets


@dataclass(frozen=True)
class DraftEngine:
    """A compiled draft.

    Attributes:
        model: the draft (its projections of target states and its Markov head are not rewritten). places: of its tensors.
        block: program of one block step. caches: its KV cache per layer.
        block_size, dcp_rank, dcp_size, interleave: token layout of the caches; those of one rank if they are replicated.
        kv_scale: what the values of the caches are multiplied by when they are read; 1 unless they are float8.
        width: most tokens one block proposes.
        window: context tokens a block sees, the latest ones; None = all.
        reads_lengths: the block step reads lengths on the host, to plan or to gather its context.
        gives_confidence: proposals come with the confidence head's opinion of them, for adaptive verification.
        costs: times of its blocks, measured for adaptive verification only.
        context_graphs, markov_graphs: the two functions around the block as CUDA graphs, None without graphs.
    """

    model: torch.nn.Module
    places: Places
    block: StepProgram
    caches: list[Tensor]
    parallel: ParallelLayout
    block_size: int
    dcp_rank: int
    dcp_size: int
    interleave: int
    kv_scale: float
    width: int
    window: int | None = None
    reads_lengths: bool = False
    gives_confidence: bool = False
    costs: StepCosts | None = None
    context_graphs: ReplayedCall | None = None
    markov_graphs: ReplayedCall | None = None

    def with_graphs(self, max_batch_size: int, widths: Sequence[int], columns: int) -> DraftEngine:
        """The same, with what surrounds the block captured as CUDA graphs.

        Args:
            widths: rows per request of the target's verify steps. columns: of a block table.
        """
        model, batches, pool = self.model, buckets(max_batch_size), torch.cuda.graph_pool_handle()
        device, vocab = self.caches[0].device, model.config.vocab_size
        taps = model.context_proj.in_features
        context = ReplayedCall(
            self._write_context,
            [(batch, rows) for batch in batches for rows in widths],
            lambda batch, rows: [
                ((batch, rows, taps), model.dtype, 0), ((batch, rows), torch.int64, -1), ((batch, columns), torch.int32, 0)
            ],
            device, pool,
        )  # fmt: skip
        markov = ReplayedCall(
            self._follow,
            [(batch,) for batch in batches],
            lambda batch: [((batch,), torch.int64, 0), ((batch, self.width, vocab), model.dtype, 0)],
            device, pool,
        )  # fmt: skip
        return replace(self, context_graphs=context, markov_graphs=markov)

    def ingest(self, taps: Tensor, positions: Tensor, block_table: Tensor) -> None:
        """Write the context entries of target rows.

        Args:
            taps: ``[T, taps]`` hidden states. positions: ``[B, S]``; rows at -1 (padding, rejected) are not written.
            block_table: ``[B, columns]``.
        """
        taps, place = taps.unflatten(0, positions.shape), tuple(positions.shape)
        if self.context_graphs is not None and self.context_graphs.holds(*place):
            self.context_graphs(place, taps, positions, block_table)
        else:
            positions, block_table = (tensor.to(taps.device, non_blocking=True) for tensor in (positions, block_table))
            self._write_context(taps, positions, block_table)

    @torch.no_grad()
    def _write_context(self, taps: Tensor, positions: Tensor, block_table: Tensor) -> None:
        """``taps [B, S, taps]``; everything on the device."""
        slots = torch.ops.dcp.cp_local_slot(
            positions, block_table, self.block_size, self.dcp_rank, self.dcp_size, self.interleave
        )
        context = self.model.project_context(taps.flatten(0, 1)[None])
        row_positions = positions.reshape(1, -1).clamp_min(0)
        for cache, pair in zip(self.caches, self.model.context_entries(context, row_positions)):
            # [1, groups, T, width] -> [T, groups * width]: latent and rope key, or keys and values.
            first, second = (entry[0].transpose(0, 1).flatten(1) for entry in pair)
            torch.ops.dcp.kv_write(first, second, cache, slots, self.kv_scale)

    def follow(self, anchors: Tensor, base: Tensor) -> Tensor:
        """Greedy tokens ``[B, K]`` of a block with base logits ``[B, K, V]``: each biases the logits of the next.

        Args:
            anchors: ``[B]``, what biases the first.
        """
        place = tuple(anchors.shape)
        if self.markov_graphs is not None and self.markov_graphs.holds(*place):
            return self.markov_graphs(place, anchors, base)[:, : base.shape[1]]
        return self._follow(anchors.to(base.device, non_blocking=True), base)

    @torch.no_grad()
    def _follow(self, anchors: Tensor, base: Tensor) -> Tensor:
        tokens = [anchors]
        for logits in base.unbind(1):
            tokens.append((logits + self.model.markov_bias(tokens[-1])).argmax(dim=-1))
        return torch.stack(tokens[1:], dim=1)

    @torch.no_grad()
    def run_block(
        self, anchors: Tensor, lengths: Tensor, block_table: Tensor, counts: Tensor, width: int
    ) -> tuple[Tensor, Tensor]:
        """Base logits ``[B, width, V]`` and hidden states ``[B, width, H]`` of one block per request.

        Args: all on the host, or all on the device, which is then not waited for unless ``reads_lengths``.
            anchors: int64 ``[B]``, the newest token of each request, at position ``lengths[b]``.
            lengths: int64 ``[B]``, context tokens per request.
            counts: int64 ``[B]``, rows wanted per request, at most ``width``; 0 leaves it out.
        """
        device = anchors.device
        ids = self.model.block_ids(anchors, width)
        column = torch.arange(width, device=device)
        positions = (lengths[:, None] + column).masked_fill(column >= counts[:, None], -1)
        # With a window the compiled block sees nothing but what follows the prefix: the window and the block itself.
        prefix = lengths if self.window is None else (lengths - self.window).clamp_min(0)
        inputs = {
            "input_ids": ids.reshape(-1),
            "row_positions": positions.reshape(-1).clamp_min(0),
            "logit_rows": torch.arange(ids.numel(), device=device),
            "positions": positions,
            "block_table": block_table,
            "prefix_lengths": prefix,
            "state_slots": torch.full((len(ids),), -1, dtype=torch.int32, device=device),
            "accepted": torch.zeros(len(ids), dtype=torch.int32, device=device),
        }
        with answering_ranks("running a draft block"):
            logits, hidden = (output.unflatten(0, positions.shape) for output in self.block(inputs))
        return logits, hidden
