# SPDX-License-Identifier: Apache-2.0
"""The two heads every DSpark draft has on top of its block: the Markov bias and the confidence."""

import torch
from torch import nn


class MarkovHead(nn.Module):
    """Low-rank bias on the logits of a row given the token sampled before it: w2 w1[previous]."""

    def __init__(self, vocab_size: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def forward(self, prev_tokens: torch.Tensor) -> torch.Tensor:
        """prev_tokens [...] int64 -> bias [..., V] in the dtype of the weights."""
        return self.markov_w2(self.markov_w1(prev_tokens))


class ConfidenceHead(nn.Module):
    """Logit of the probability that a row's token is accepted, given that all earlier ones are. Computed in float32."""

    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """features [..., width] -> logit [...]."""
        dtype = torch.promote_types(features.dtype, torch.float32)
        weight, bias = self.proj.weight.to(dtype), self.proj.bias.to(dtype)
        return nn.functional.linear(features.to(dtype), weight, bias).squeeze(-1)
