# SPDX-License-Identifier: Apache-2.0
"""The training loss of a DSpark draft."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

CE_WEIGHT, L1_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0


@dataclass(frozen=True)
class DraftLoss:
    """``total`` carries the gradient; the rest are detached scalars for logging, ``acceptance`` [K] is per row."""

    total: torch.Tensor
    cross_entropy: torch.Tensor
    l1: torch.Tensor
    confidence: torch.Tensor
    acceptance: torch.Tensor


def draft_loss(
    logits: torch.Tensor,
    target_logits: torch.Tensor,
    labels: torch.Tensor,
    valid: torch.Tensor,
    confidence_logits: torch.Tensor | None,
    decay: float | None = None,
) -> DraftLoss:
    """0.1 CE + 0.9 |p_draft - p_target|_1 + BCE(confidence, 1 - |p_draft - p_target|_1 / 2), as in the DSpark paper.

    logits, target_logits [..., K, V] are the Markov-biased draft logits and the target's logits at the same positions;
    labels [..., K] int64 the tokens that followed; valid [..., K] bool the rows that count; confidence_logits [..., K]
    or None for a draft without that head. Row j weighs exp(-j / decay), decay defaulting to K, and each term is a
    weighted mean. Gradients reach neither the target logits nor the confidence target. Everything runs in float32.
    """
    rows = logits.shape[-2]
    logits, target_logits = logits.float(), target_logits.detach().float()
    weights = torch.exp(-torch.arange(rows, device=logits.device) / (rows if decay is None else decay)) * valid
    scale = weights.sum().clamp_min(torch.finfo(torch.float32).tiny)

    def mean(per_row: torch.Tensor) -> torch.Tensor:
        return (per_row * weights).sum() / scale

    cross_entropy = mean(F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape))
    distance = (logits.softmax(-1) - target_logits.softmax(-1)).abs().sum(-1)
    acceptance = (1 - 0.5 * distance).detach().clamp(0, 1)
    confidence = logits.new_zeros(())
    if confidence_logits is not None:
        confidence = mean(F.binary_cross_entropy_with_logits(confidence_logits.float(), acceptance, reduction="none"))
    l1 = mean(distance)
    counted = valid.flatten(0, -2).sum(0).clamp_min(1)
    return DraftLoss(
        total=CE_WEIGHT * cross_entropy + L1_WEIGHT * l1 + CONFIDENCE_WEIGHT * confidence,
        cross_entropy=cross_entropy.detach(),
        l1=l1.detach(),
        confidence=confidence.detach(),
        acceptance=(acceptance * valid).flatten(0, -2).sum(0) / counted,
    )
