# SPDX-License-Identifier: Apache-2.0
"""Training forward of a DSpark draft: the blocks of many anchors of one sequence in a single pass.

The sequence's projected target states are ingested once; behind them stand the blocks of all anchors, and a mask lets
each block see the context before its own anchor and itself. That is exactly what the draft sees when it runs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from dcp_compile.errors import ConfigError

from .loss import DraftLoss, draft_loss


@dataclass(frozen=True)
class Blocks:
    """The blocks of A anchors with K rows each, all [B, A, K]. Row j of an anchor at position n stands at n + j.

    positions; prev_tokens, the true token at the row's own position, which the Markov bias is taught with; labels, the
    true token after it; valid, whether that token exists and it and all labels before it in the block count.
    """

    positions: torch.Tensor
    prev_tokens: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor


def sample_anchors(loss_mask: torch.Tensor, count: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw ``count`` anchor positions per sequence, [B, count] ascending, among those whose next token counts.

    loss_mask [B, S] bool marks the tokens to learn. Sequences with fewer candidates repeat them. Raises ConfigError if
    a sequence has none.
    """
    candidates = loss_mask[:, 1:].float()
    if not bool((candidates.sum(1) > 0).all()):
        raise ConfigError("a sequence has no token to learn after its first one; drop it from the batch")
    spread = int(candidates.sum(1).min())
    anchors = torch.multinomial(candidates, count, replacement=count > spread, generator=generator)
    return anchors.sort(dim=1).values


def make_blocks(input_ids: torch.Tensor, anchors: torch.Tensor, num_tokens: int, loss_mask: torch.Tensor) -> Blocks:
    """input_ids [B, S] from position 0 on, anchors [B, A], loss_mask [B, S] bool -> ``Blocks`` of K = num_tokens."""
    length = input_ids.shape[1]
    positions = anchors.unsqueeze(-1) + torch.arange(num_tokens, device=anchors.device)

    def at(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return values.gather(1, where.clamp(max=length - 1).flatten(1)).view(where.shape)

    counts = (positions + 1 < length) & at(loss_mask, positions + 1)
    valid = counts.long().cumprod(-1).bool()
    return Blocks(positions, at(input_ids, positions), at(input_ids, positions + 1), valid)


def blocks_mask(
    anchors: torch.Tensor, length: int, num_tokens: int, is_causal: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Additive mask [B, 1, A*K, length + A*K]: a row sees the context before its anchor and its own block."""
    device = anchors.device
    row = torch.arange(anchors.shape[1] * num_tokens, device=device)
    anchor_of_row = anchors.repeat_interleave(num_tokens, dim=1)
    context = torch.arange(length, device=device) < anchor_of_row.unsqueeze(-1)
    same_block = row[:, None] // num_tokens == row[None, :] // num_tokens
    if is_causal:
        same_block = same_block & (row[None, :] <= row[:, None])
    visible = torch.cat((context, same_block.expand(anchors.shape[0], -1, -1)), dim=-1).unsqueeze(1)
    return torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill(~visible, torch.finfo(dtype).min)


def parallel_blocks(
    model: PreTrainedModel,
    taps: torch.Tensor,
    input_ids: torch.Tensor,
    anchors: torch.Tensor,
    num_tokens: int,
    embed: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Hidden states [B, A, K, H] of the blocks of all anchors, each as ``model`` computes it alone.

    taps [B, S, taps * target H] and input_ids [B, S] of positions 0..S-1, padded on the right if at all; anchors [B, A]
    positions below S; ``embed`` the target's embedding.
    """
    batch, length = input_ids.shape
    cache = DynamicCache()
    everywhere = torch.arange(length, device=input_ids.device).expand(batch, -1)
    model.ingest(model.project_context(taps), everywhere, cache)
    ids = model.block_ids(input_ids.gather(1, anchors), num_tokens)
    positions = anchors.unsqueeze(-1) + torch.arange(num_tokens, device=anchors.device)
    embeds = embed(ids.flatten(1))
    mask = blocks_mask(anchors, length, num_tokens, model.config.is_causal, embeds.dtype)
    hidden = model(inputs_embeds=embeds, position_ids=positions.flatten(1), cache=cache, attention_mask=mask)
    return hidden.view(*ids.shape, -1)


def training_step(
    model: PreTrainedModel,
    taps: torch.Tensor,
    input_ids: torch.Tensor,
    target_logits: torch.Tensor,
    anchors: torch.Tensor,
    num_tokens: int,
    loss_mask: torch.Tensor,
    embed: Callable[[torch.Tensor], torch.Tensor],
    lm_head: Callable[[torch.Tensor], torch.Tensor],
    decay: float | None = None,
) -> DraftLoss:
    """Loss of the blocks of ``anchors`` [B, A] against the target's logits [B, S, V] over the same sequence.

    Row j of the anchor at n is judged by the target's logits at n + j, those that predict position n + j + 1. The other
    arguments are those of ``parallel_blocks``, ``make_blocks`` and ``draft_loss``.
    """
    blocks = make_blocks(input_ids, anchors, num_tokens, loss_mask)
    hidden = parallel_blocks(model, taps, input_ids, anchors, num_tokens, embed)
    logits = lm_head(hidden) + model.markov_bias(blocks.prev_tokens)
    rows = blocks.positions.clamp(max=input_ids.shape[1] - 1)
    batch = torch.arange(input_ids.shape[0], device=input_ids.device)[:, None, None]
    confidence = None if model.confidence_head is None else model.confidence_logits(hidden, blocks.prev_tokens)
    return draft_loss(logits, target_logits[batch, rows], blocks.labels, blocks.valid, confidence, decay)
