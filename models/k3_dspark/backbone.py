# SPDX-License-Identifier: Apache-2.0
"""The part of a DSpark draft that does not depend on the kind of its attention.

The draft keeps no embedding and no output head of its own: both are the target's. Its cache holds, per layer and
position, the key and value projections of the *projected target state* of that position; the rows of the current block
follow them as scratch.
"""

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from dcp_compile.errors import ConfigError
from dcp_compile.parallel.loading import ShardedLoading

from .attention import block_mask
from .drafting import DSparkDrafting
from .heads import ConfidenceHead, MarkovHead
from .layers import DSparkRMSNorm
from .rope import DSparkRotaryEmbedding
from .weights import StrictLoading


class DSparkBackbone(DSparkDrafting, StrictLoading, ShardedLoading, PreTrainedModel):
    """Base of the drafts; a subclass makes the modules annotated below.

    Positions are token positions; position s of the cache holds the target state of the token *at* s. A step for an
    anchor (the newest token) at position n needs the context of positions 0..n-1 in the cache:

        c = model.project_context(taps);  model.ingest(c, position_ids, cache)
        hidden = model(inputs_embeds=embed(model.block_ids(anchor, K)), position_ids=n + arange(K), cache=cache)

    Row j of the block predicts position n + j + 1. ``draft_block`` does the step and the sampling.
    """

    replicated_cache = False
    """Whether the cache holds keys and values of many heads, which nothing shards by token."""

    _no_split_modules = ["DSparkLayer"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _keys_to_ignore_on_load_unexpected = [r"^embed_tokens\.", r"^lm_head\.", r"rotary_emb\.inv_freq$"]

    context_proj: nn.Linear
    context_norm: DSparkRMSNorm
    layers: nn.ModuleList
    final_norm: DSparkRMSNorm
    rotary_emb: DSparkRotaryEmbedding

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DSparkRotaryEmbedding):
            # Loading builds the model without storage and then fills whatever the checkpoint does not hold.
            module.inv_freq = module.frequencies(module.inv_freq.device)

    def add_heads(self) -> None:
        """Make the Markov head, the confidence head if the config has one, and the place of the target's embedding."""
        config = self.config
        # Set by set_input_embeddings; a frozen copy in a checkpoint is skipped.
        self.register_module("embed_tokens", None)
        self.markov_head = MarkovHead(config.vocab_size, config.markov_rank)
        self.confidence_head = None
        if config.enable_confidence_head:
            width = config.hidden_size + config.markov_rank * config.confidence_head_with_markov
            self.confidence_head = ConfidenceHead(width)
        else:
            self._keys_to_ignore_on_load_unexpected = [*self._keys_to_ignore_on_load_unexpected, r"^confidence_head\."]

    def get_input_embeddings(self) -> nn.Module | None:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module | None) -> None:
        """Share the target's embedding, so that forward accepts ``input_ids``."""
        self.embed_tokens = value

    def project_context(self, taps: torch.Tensor) -> torch.Tensor:
        """Concatenated raw outputs of the tapped target layers [B, S, taps * target H] -> context states [B, S, H]."""
        return self.context_norm(self.context_proj(taps))

    def context_entries(
        self, context: torch.Tensor, position_ids: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Context states [B, S, H] at positions [B, S] -> the pair of tensors every layer caches for them.

        The states enter each layer's key/value projection as they are: no input layernorm, no attention, no MLP.
        """
        tables = self.rotary_emb(position_ids)
        return [layer.self_attn.cache_entry(context, tables) for layer in self.layers]

    def ingest(self, context: torch.Tensor, position_ids: torch.Tensor, cache: Cache) -> None:
        """Append the context states [B, S, H] of positions [B, S] to the cache of every layer."""
        for layer_idx, entry in enumerate(self.context_entries(context, position_ids)):
            cache.update(*entry, layer_idx)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Block rows at positions [B, K] -> final hidden states [B, K, H], ready for the target's output head.

        Every row sees the whole cache and all rows of the block (only the earlier ones if config.is_causal). The rows
        are appended to the cache as scratch: crop them, or overwrite them once their tokens are accepted. Rows come
        as target embeddings [B, K, H], or as ids [B, K] if the target's embedding is shared. attention_mask is
        [B, cached + K] with false for left padding, or a ready additive mask [B, 1, K, cached + K].
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ConfigError("give exactly one of input_ids and inputs_embeds")
        if position_ids is None:
            raise ConfigError("position_ids is missing: a block needs the token positions of its rows, [B, K]")
        if inputs_embeds is None:
            if self.embed_tokens is None:
                raise ConfigError(
                    "input_ids need the target's embedding: set_input_embeddings(target.get_input_embeddings())"
                )
            inputs_embeds = self.embed_tokens(input_ids)
        if attention_mask is None or attention_mask.dim() == 2:
            cached = 0 if cache is None else cache.get_seq_length()
            rows, dtype = inputs_embeds.shape[1], inputs_embeds.dtype
            attention_mask = block_mask(
                attention_mask, rows, cached, self.config.is_causal, dtype, inputs_embeds.device
            )
        tables = self.rotary_emb(position_ids)
        x = inputs_embeds
        for layer in self.layers:
            x = layer(x, tables, attention_mask, cache)
        return self.final_norm(x)
