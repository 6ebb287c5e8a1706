# SPDX-License-Identifier: Apache-2.0
"""Which draft tokens to keep, and which token follows them. Every rule here is lossless.

Shapes: ``drafts [rows, K]`` int64 holds the draft tokens d_1 .. d_K, of which the first ``counts[row]`` are real (the
others must be valid token ids and are ignored). ``probs [rows, K + 1, vocab]`` holds the target's distribution p_j of
the token after the anchor and d_1 .. d_{j-1}, at index j - 1; a row reads indices 0 .. ``counts[row]`` only.
``draft_probs [rows, K, vocab]`` holds q_j, the distribution d_j was drawn from; None means that q_j is one-hot at d_j,
as for a deterministic draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    accepted: draft tokens kept, int64 ``[rows]``, 0 .. ``counts[row]``.
    tokens: int64 ``[rows, K + 1]``; the first ``accepted[row] + 1`` are emitted: the kept drafts, then one new token.
    """

    accepted: Tensor
    tokens: Tensor


def greedy(scores: Tensor, drafts: Tensor, counts: Tensor) -> Verdict:
    """Keep drafts while they are the argmax of ``scores [rows, K + 1, vocab]``; the next argmax follows them."""
    targets = scores.argmax(dim=-1)
    agree = (targets[:, :-1] == drafts) & _real(drafts, counts)
    return Verdict(agree.cumprod(dim=1).sum(dim=1), targets)


def standard(
    probs: Tensor,
    drafts: Tensor,
    counts: Tensor,
    draft_probs: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Verdict:
    """Token by token: keep d_j with probability min(1, p_j(d_j) / q_j(d_j)), until the first rejection.

    After a rejection at j the next token is drawn from max(p_j - q_j, 0), normalised; if all are kept, from p_{K+1}.
    Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023, algorithm 1.
    """
    target, draft = _at_drafts(probs, drafts, draft_probs)
    uniform = torch.rand(drafts.shape, device=probs.device, generator=generator)
    # Strict: a draft the target gives no probability is rejected even by a draw of exactly 0.
    keep = (uniform * draft < target) & (draft > 0) & _real(drafts, counts)
    accepted = keep.cumprod(dim=1).sum(dim=1)
    weight = torch.ones_like(probs[:, 0, 0])
    return _with_next(probs, drafts, counts, draft_probs, accepted, weight, generator)


def block(
    probs: Tensor,
    drafts: Tensor,
    counts: Tensor,
    draft_probs: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Verdict:
    """Judge the block as a whole; keeps at least as many tokens as :func:`standard` on average.

    With P_0 = 1, P_i = min(1, P_{i-1} p_i(d_i) / q_i(d_i)) and R_i = sum_x max(P_i p_{i+1}(x) - q_{i+1}(x), 0), prefix
    i passes with probability h_i = R_i / (R_i + 1 - P_i) for i < K and h_K = P_K, each by its own draw; the longest
    prefix that passes is kept (the empty one always passes). The next token is drawn from max(P_i p_{i+1} - q_{i+1},
    0), normalised, or from p_{K+1} if all are kept. Source: Sun et al., Block Verification Accelerates Speculative
    Decoding, 2024, algorithm 2.
    """
    rows, width = drafts.shape
    target, draft = _at_drafts(probs, drafts, draft_probs)
    ratio = torch.where(draft > 0, target / draft, 0.0)
    prefix = torch.ones(rows, width + 1, dtype=probs.dtype, device=probs.device)  # P_0 .. P_K
    for i in range(width):
        prefix[:, i + 1] = (prefix[:, i] * ratio[:, i]).clamp(max=1.0)
    before = prefix[:, :-1]
    if draft_probs is None:
        left = before * (1.0 - target)
    else:
        left = (before[..., None] * probs[:, :-1] - draft_probs).clamp(min=0.0).sum(dim=-1)
    total = left + 1.0 - before
    passes = torch.where(total > 0, left / total, 1.0)  # h_0 .. h_{K-1}

    index = torch.arange(1, width + 1, device=probs.device)
    last = index == counts[:, None]
    threshold = torch.where(last, prefix[:, 1:], torch.cat([passes[:, 1:], prefix[:, -1:]], dim=1))
    uniform = torch.rand(drafts.shape, device=probs.device, generator=generator)
    passed = (uniform < threshold) & _real(drafts, counts)
    accepted = (passed * index).amax(dim=1) if width else torch.zeros_like(counts)
    weight = prefix.gather(1, accepted[:, None]).squeeze(1)
    return _with_next(probs, drafts, counts, draft_probs, accepted, weight, generator)


RULES = {"standard": standard, "block": block}


def _real(drafts: Tensor, counts: Tensor) -> Tensor:
    return torch.arange(drafts.shape[1], device=drafts.device) < counts[:, None]


def _at_drafts(probs: Tensor, drafts: Tensor, draft_probs: Tensor | None) -> tuple[Tensor, Tensor]:
    """p_j(d_j) and q_j(d_j), each ``[rows, K]``."""
    target = probs[:, :-1].gather(2, drafts[..., None]).squeeze(2)
    if draft_probs is None:
        return target, torch.ones_like(target)
    return target, draft_probs.gather(2, drafts[..., None]).squeeze(2)


def _with_next(
    probs: Tensor,
    drafts: Tensor,
    counts: Tensor,
    draft_probs: Tensor | None,
    accepted: Tensor,
    weight: Tensor,
    generator: torch.Generator | None,
) -> Verdict:
    """Draw the token after the kept drafts: from max(weight * p - q, 0) where a draft was rejected, else from p."""
    rows = torch.arange(len(drafts), device=drafts.device)
    following = probs[rows, accepted]
    if drafts.shape[1]:
        at = accepted.clamp(max=drafts.shape[1] - 1)
        if draft_probs is None:
            draft = torch.zeros_like(following).scatter(1, drafts[rows, at, None], 1.0)
        else:
            draft = draft_probs[rows, at]
        residual = (weight[:, None] * following - draft).clamp(min=0.0)
        # Rounding alone can leave nothing over: p equals q then, and p itself is the right distribution.
        use = (accepted < counts) & (residual.sum(dim=1) > 0)
        following = torch.where(use[:, None], residual, following)
    chosen = torch.multinomial(following, num_samples=1, generator=generator)
    tokens = torch.cat([drafts, torch.zeros_like(chosen)], dim=1).scatter(1, accepted[:, None], chosen)
    return Verdict(accepted, tokens)
