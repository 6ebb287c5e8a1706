# SPDX-License-Identifier: Apache-2.0
"""What a DSpark draft does around its block: heads, and the semi-autoregressive proposal of K tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import Cache

from dcp_compile.errors import CapacityError, ConfigError

from .heads import ConfidenceHead, MarkovHead


@dataclass(frozen=True)
class DraftBlock:
    """One proposal; row j was sampled from ``logits[:, j]``, the Markov-biased ``base_logits[:, j]``, over temperature.

    tokens [B, K] int64, base_logits and logits [B, K, V] in the model dtype, confidences [B, K] float32 or None.
    """

    tokens: torch.Tensor
    base_logits: torch.Tensor
    logits: torch.Tensor
    confidences: torch.Tensor | None


class DSparkDrafting:
    """Mixed into a draft model that has ``markov_head``, ``confidence_head``, ``config`` and a block forward."""

    markov_head: MarkovHead
    confidence_head: ConfidenceHead | None

    def markov_bias(self, prev_tokens: torch.Tensor) -> torch.Tensor:
        """prev_tokens [...] int64, the token sampled before each row -> bias on its logits [..., V], model dtype."""
        return self.markov_head(prev_tokens)

    def confidence_logits(self, hidden: torch.Tensor, prev_tokens: torch.Tensor) -> torch.Tensor:
        """Block output ``hidden`` [..., H] and the token before each row [...] -> acceptance logits [...], float32.

        Raises ConfigError for a draft without a confidence head.
        """
        if self.confidence_head is None:
            raise ConfigError("enable_confidence_head is False: this draft has no confidence head to read")
        if self.config.confidence_head_with_markov:
            hidden = torch.cat((hidden, self.markov_head.markov_w1(prev_tokens)), dim=-1)
        return self.confidence_head(hidden)

    def confidence(self, hidden: torch.Tensor, prev_tokens: torch.Tensor) -> torch.Tensor:
        """Probability [...] that the token of each row is accepted if all before it are (see ``confidence_logits``)."""
        return self.confidence_logits(hidden, prev_tokens).sigmoid()

    def block_ids(self, anchor: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """anchor [...] int64 -> ids of its block [..., K]: the anchor, then K - 1 mask tokens."""
        masks = anchor.new_full((*anchor.shape, num_tokens - 1), self.config.mask_token_id)
        return torch.cat((anchor.unsqueeze(-1), masks), dim=-1)

    @torch.no_grad()
    def draft_block(
        self,
        anchor: torch.Tensor,
        n: int | torch.Tensor,
        cache: Cache,
        embed: Callable[[torch.Tensor], torch.Tensor],
        lm_head: Callable[[torch.Tensor], torch.Tensor],
        num_tokens: int,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        context_mask: torch.Tensor | None = None,
    ) -> DraftBlock:
        """Propose the tokens at positions n + 1 .. n + K after the anchor at position n.

        anchor [B] int64, the last sampled token; n its position, an int or [B]; ``cache`` holds the ingested context of
        positions below n and is left as it was; ``embed`` and ``lm_head`` are the target's; temperature 0 means greedy;
        context_mask [B, cached] bool hides left-padded cache entries.

        Row j adds the Markov bias of the token drawn by row j - 1 (the anchor for row 0) to its own logits before the
        temperature is applied. Raises ConfigError if num_tokens is not within 1..block_size, CapacityError if the block
        passes max_position_embeddings.
        """
        if not 1 <= num_tokens <= self.config.block_size:
            raise ConfigError(
                f"num_tokens={num_tokens} must be within 1..{self.config.block_size}, the block this draft was trained "
                "for; longer blocks lose acceptance at every position"
            )
        positions = torch.as_tensor(n, device=anchor.device).expand(anchor.shape).unsqueeze(1)
        positions = positions + torch.arange(num_tokens, device=anchor.device)
        limit = self.config.max_position_embeddings
        last = int(positions.max())
        if last >= limit:
            raise CapacityError(
                f"the block reaches position {last}, max_position_embeddings is {limit}; draft fewer tokens"
            )
        if context_mask is not None:
            context_mask = torch.nn.functional.pad(context_mask, (0, num_tokens), value=True)
        embeds = embed(self.block_ids(anchor, num_tokens))
        hidden = self(inputs_embeds=embeds, position_ids=positions, cache=cache, attention_mask=context_mask)
        cache.crop(-num_tokens)

        base_logits = lm_head(hidden)
        tokens, logits, prev = [], [], anchor
        for row in range(num_tokens):
            logits.append(base_logits[:, row] + self.markov_bias(prev))
            prev = _sample(logits[-1], temperature, generator)
            tokens.append(prev)
        tokens = torch.stack(tokens, dim=1)
        confidences = None
        if self.confidence_head is not None:
            confidences = self.confidence(hidden, torch.cat((anchor.unsqueeze(1), tokens[:, :-1]), dim=1))
        return DraftBlock(tokens, base_logits, torch.stack(logits, dim=1), confidences)


def _sample(logits: torch.Tensor, temperature: float, generator: torch.Generator | None) -> torch.Tensor:
    """logits [B, V] -> token [B]."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
