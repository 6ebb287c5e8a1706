# SPDX-License-Identifier: Apache-2.0
"""The block step of a draft whose cache holds whole keys and values: every rank keeps all of it.

There is no latent to shard by token, and nothing for the passes to rewrite: the draft runs as it is, over the pages that
its requests have in the target's block tables. A page holds all tokens that the ranks hold together under its id.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ..lower import StepProgram


def replicated_block(step: nn.Module, caches: list[Tensor], window: int | None) -> StepProgram:
    """The program of one block.

    Args:
        step: the draft between the target's embedding and head; its config counts the key-value heads.
        caches: per layer ``[pages, page, 2 * groups * head]``, the keys of a token before its values.
        window: context tokens a block sees, the latest ones; None = all.
    """
    page = caches[0].shape[1]
    groups = step.config.num_key_value_heads

    def run(inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        positions = inputs["positions"]
        device = caches[0].device
        lengths = positions[:, 0].clamp_min(0)  # a block starts where its context ends
        first = torch.zeros_like(lengths) if window is None else (lengths - window).clamp_min(0)
        seen = lengths - first
        index = first[:, None] + torch.arange(int(seen.max()))
        in_context = index < lengths[:, None]
        index = torch.where(in_context, index, 0)
        slots = inputs["block_table"].gather(1, index // page).long() * page + index % page
        slots, in_context = slots.to(device), in_context.to(device)
        cache = DynamicCache()
        for layer, pool in enumerate(caches):
            entries = torch.where(in_context[..., None], pool.flatten(0, 1)[slots], 0)  # what is hidden is undefined
            keys_and_values = entries.unflatten(-1, (2, groups, -1)).permute(2, 0, 3, 1, 4)  # [2, B, groups, context, head]
            cache.update(*keys_and_values, layer)
        visible = torch.cat([in_context, (positions >= 0).to(device)], dim=1)
        with torch.no_grad():
            out = step(
                inputs["input_ids"].view(positions.shape).to(device),
                inputs["row_positions"].view(positions.shape).to(device),
                cache,
                attention_mask=visible,
            )
        return out.logits.flatten(0, 1), out.hidden_states.flatten(0, 1)

    return run
