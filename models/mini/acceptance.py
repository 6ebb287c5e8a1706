# SPDX-License-Identifier: Apache-2.0
"""How many tokens a draft wins per verify step, measured without any cache.

Every step runs the target over the whole text again. Nothing has to be rolled back that way, requests of different
lengths share one batch, and what is counted is the sampling rule alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache


@dataclass(frozen=True)
class Verified:
    """One verify step of B requests.

    accepted [B] drafts that stand; tokens [B, buffer] with the accepted drafts and the token after them written,
    whatever follows is scratch; taps [B, buffer, taps * target H] of those tokens, valid up to the last accepted draft.
    """

    accepted: Tensor
    tokens: Tensor
    taps: Tensor


@torch.no_grad()
def target_states(target: nn.Module, tokens: Tensor, layers: list[int], batch: int = 256) -> tuple[Tensor, Tensor]:
    """tokens [B, S] -> final hidden states [B, S, H] and taps of ``layers`` [B, S, taps * H], ``batch`` at a time."""
    outputs = [target.model(part, tap_layers=layers, use_cache=False) for part in tokens.split(batch)]
    return torch.cat([out.last_hidden_state for out in outputs]), torch.cat([out.taps for out in outputs])


@torch.no_grad()
def verify_step(
    target: nn.Module,
    draft: nn.Module,
    tokens: Tensor,
    taps: Tensor,
    lengths: Tensor,
    num_tokens: int,
    temperature: float,
    generator: torch.Generator | None = None,
) -> Verified:
    """Draft K = num_tokens tokens behind the first lengths [B] of tokens [B, buffer] and judge them by the target.

    The buffer needs room for lengths + K + 1 tokens; taps [B, buffer, taps * target H] are read below lengths - 1,
    where the anchor is. Temperature 0 accepts what agrees with the target's argmax, any other one is standard rejection
    sampling (Leviathan et al. 2023).
    """
    request = torch.arange(len(tokens), device=tokens.device)
    places = torch.arange(tokens.shape[1], device=tokens.device)
    anchor = lengths - 1

    cache = DynamicCache()
    draft.ingest(draft.project_context(taps), places.expand(len(tokens), -1), cache)
    block = draft.draft_block(
        tokens[request, anchor], anchor, cache, target.get_input_embeddings(), target.lm_head, num_tokens,
        temperature, generator, context_mask=places < anchor[:, None],
    )  # fmt: skip

    rows = anchor[:, None] + torch.arange(num_tokens + 1, device=tokens.device)
    tokens = tokens.scatter(1, rows[:, 1:], block.tokens)
    hidden, taps = target_states(target, tokens, draft.config.target_layer_ids)
    logits = target.lm_head(hidden[request[:, None], rows]).float()
    if temperature == 0:
        choices = logits.argmax(-1)
        accepted = (choices[:, :-1] == block.tokens).long().cumprod(1).sum(1)
        following = choices[request, accepted]
    else:
        p, q = (logits / temperature).softmax(-1), (block.logits.float() / temperature).softmax(-1)
        drawn_p, drawn_q = (x[:, :num_tokens].gather(2, block.tokens[..., None]).squeeze(2) for x in (p, q))
        uniform = torch.rand(drawn_p.shape, device=tokens.device, generator=generator)
        accepted = (drawn_p > uniform * drawn_q).long().cumprod(1).sum(1)
        q = nn.functional.pad(q, (0, 0, 0, 1))  # behind the block there is no draft to subtract
        following = torch.multinomial((p - q).clamp_min(0)[request, accepted], 1, generator=generator).squeeze(1)
    return Verified(accepted, tokens.scatter(1, (lengths + accepted)[:, None], following[:, None]), taps)


def on_text(
    target: nn.Module,
    draft: nn.Module,
    windows: Tensor,
    temperature: float,
    rounds: int,
    generator: torch.Generator,
    shortest: int = 32,
) -> dict:
    """Summary of verify steps behind random prefixes of windows [B, S] of given text, ``rounds`` prefixes of each.

    Prefixes have at least ``shortest`` tokens; ``generator`` is one of the device of the windows.
    """
    num_tokens = draft.config.block_size
    _, taps = target_states(target, windows, draft.config.target_layer_ids)
    accepted = []
    for _ in range(rounds):
        end = windows.shape[1] - num_tokens
        lengths = torch.randint(shortest, end, (len(windows),), device=windows.device, generator=generator)
        accepted.append(verify_step(target, draft, windows, taps, lengths, num_tokens, temperature, generator).accepted)
    return summary(torch.cat(accepted), num_tokens)


def free_running(
    target: nn.Module,
    draft: nn.Module,
    prompts: Tensor,
    new_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> tuple[dict, list[list[int]]]:
    """Speculative decoding behind prompts [B, S] until each has at least new_tokens more tokens or has ended.

    Returns the summary of its verify steps and the texts, ids without the prompt, with whatever the last step wrote
    beyond the end.
    """
    num_tokens, (batch, prompt) = draft.config.block_size, prompts.shape
    room = prompt + new_tokens + num_tokens + 1
    tokens = nn.functional.pad(prompts, (0, room - prompt))
    _, taps = target_states(target, tokens, draft.config.target_layer_ids)
    lengths = torch.full((batch,), prompt, device=prompts.device)
    places = torch.arange(room, device=prompts.device)
    counted = []
    while True:
        written = (places >= prompt) & (places < lengths[:, None])
        ended = ((tokens == target.config.eos_token_id) & written).any(1)
        running = (lengths < prompt + new_tokens) & ~ended
        if not bool(running.any()):
            break
        step = verify_step(
            target, draft, tokens, taps, lengths.clamp_max(prompt + new_tokens), num_tokens, temperature, generator
        )
        tokens, taps = torch.where(running[:, None], step.tokens, tokens), step.taps
        lengths = torch.where(running, lengths + step.accepted + 1, lengths)
        counted.append(step.accepted[running])
    texts = [row[prompt:length].tolist() for row, length in zip(tokens.cpu(), lengths.tolist())]
    return summary(torch.cat(counted), num_tokens), texts


def summary(accepted: Tensor, num_tokens: int) -> dict:
    """What accepted [steps] comes to.

    ``length`` is in tokens per verify step, the one after the accepted drafts included; ``reached_and_accepted`` has
    for each row of the block the share of ``steps`` in which it stood.
    """
    rates = [(accepted > row).float().mean().item() for row in range(num_tokens)]
    return {"length": accepted.float().mean().item() + 1, "steps": len(accepted), "reached_and_accepted": rates}
