# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding spelled out: one request, no batching, no graphs, the recurrent state rolled back by copying."""

import copy
from dataclasses import dataclass

import torch
from transformers import DynamicCache

RULES = ("one_hot", "standard", "block")


@dataclass(frozen=True)
class Speculation:
    """tokens [new] int64, the tokens after the prompt; accepted, the number of accepted drafts per verify step."""

    tokens: torch.Tensor
    accepted: list[int]


@torch.no_grad()
def plain_greedy(target, prompt, new_tokens):
    """prompt [1, S] -> [new_tokens], one token per step."""
    cache, tokens, ids = DynamicCache(config=target.config), [], prompt
    for _ in range(new_tokens):
        ids = target(ids, cache=cache).logits[:, -1:].argmax(-1)
        tokens.append(ids[0, 0])
    return torch.stack(tokens)


@torch.no_grad()
def speculative_greedy(target, draft, prompt, new_tokens, num_tokens):
    """prompt [1, S] -> Speculation of new_tokens tokens with blocks of num_tokens."""
    embed, lm_head, taps = target.get_input_embeddings(), target.get_output_embeddings(), draft.config.target_layer_ids
    target_cache, draft_cache = DynamicCache(config=target.config), DynamicCache()

    def ingest(states, start):
        positions = torch.arange(start, start + states.shape[1])[None]
        draft.ingest(draft.project_context(states), positions, draft_cache)

    out = target(prompt, cache=target_cache, tap_layers=taps)
    n, anchor = prompt.shape[1], out.logits[:, -1].argmax(-1)
    ingest(out.taps, 0)
    tokens, accepted = [anchor], []
    while len(tokens) < new_tokens:
        rows = min(num_tokens, new_tokens - len(tokens))
        drafts = draft.draft_block(anchor, n, draft_cache, embed, lm_head, rows).tokens
        query, before = torch.cat((anchor[:, None], drafts), 1), copy.deepcopy(target_cache)
        out = target(query, cache=target_cache, tap_layers=taps)
        choices = out.logits.argmax(-1)
        a = int((choices[:, :-1] == drafts).long().cumprod(-1).sum())
        if a < rows:
            target_cache = before
            target(query[:, : a + 1], cache=target_cache)
        ingest(out.taps[:, : a + 1], n)
        tokens += [*drafts[0, :a, None], choices[:, a]]
        accepted.append(a)
        n, anchor = n + a + 1, choices[:, a]
    return Speculation(torch.cat(tokens)[:new_tokens], accepted)


def accept(rule, drafts, q, p, generator):
    """Accepted drafts and the token after them, for a batch of finished proposals.

    drafts [B, K]; q [B, K, V] the distributions they were drawn from; p [B, K + 1, V] the target's. Returns the number
    accepted [B] and the next token [B]. Rules: "one_hot" and "standard" rejection sampling (Leviathan et al. 2023), the
    first taking q as certain; "block" verification (Sun et al. 2024).
    """
    batch, rows = drafts.shape
    if rule == "one_hot":
        q = torch.nn.functional.one_hot(drafts, p.shape[-1]).to(p.dtype)
    u = torch.rand(batch, rows, generator=generator, dtype=p.dtype)
    p_drawn, q_drawn = (x[:, :rows].gather(-1, drafts[..., None]).squeeze(-1) for x in (p, q))
    if rule == "block":
        reach = [torch.ones(batch, dtype=p.dtype)]
        for i in range(rows):
            reach.append((reach[-1] * p_drawn[:, i] / q_drawn[:, i]).clamp(max=1))
        reach = torch.stack(reach, 1)  # [B, K + 1]
        left = (reach[:, 1:rows, None] * p[:, 1:rows] - q[:, 1:]).clamp(min=0).sum(-1)
        stop = left / (left + 1 - reach[:, 1:rows]).clamp(min=1e-300)
        stop = torch.cat((torch.where(left + 1 - reach[:, 1:rows] == 0, 1.0, stop), reach[:, rows:]), 1)
        index = torch.arange(1, rows + 1)
        count = torch.where(u <= stop, index, 0).amax(1)
        weight = reach.gather(1, count[:, None])
    else:
        count = (p_drawn > u * q_drawn).long().cumprod(1).sum(1)
        weight = torch.ones(batch, 1, dtype=p.dtype)
    every = torch.arange(batch)
    taken = torch.cat((q, torch.zeros_like(p[:, :1])), 1)[every, count]
    residual = (weight * p[every, count] - taken).clamp(min=0)
    residual = torch.where(count[:, None] == rows, p[:, -1], residual)
    return count, torch.multinomial(residual, 1, generator=generator).squeeze(1)
