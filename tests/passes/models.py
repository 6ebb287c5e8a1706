# SPDX-License-Identifier: Apache-2.0
"""The models of the pass tests, each captured once per run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn

from dcp_compile.capture import StepGraph, capture
from dcp_compile.parallel import ParallelLayout
from dcp_compile.parallel.shard import shard_model
from dcp_compile.passes import PassContext
from tests.mla_variants import ExpandsBeforeCaching, vary
from tests.tiny_models import tiny_deepseek_v3, tiny_kimi_k3, tiny_kimi_linear

CONTEXT = PassContext(block_size=4, pages=9, state_slots=3, verify_rows=4)

MODELS: dict[str, Callable[[], nn.Module]] = {
    # float64 where nothing but attention and a dense MLP is in the way: the comparison can be exact then
    "deepseek": lambda: tiny_deepseek_v3(2, dtype=torch.float64, first_k_dense_replace=2),
    "deepseek_moe": lambda: tiny_deepseek_v3(
        2, q_lora_rank=None, rope_interleave=False, num_attention_heads=3, num_key_value_heads=3, kv_lora_rank=20,
        qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=14,
    ),
    "expanded": lambda: vary(ExpandsBeforeCaching, 2, torch.float64, q_lora_rank=None, rope_interleave=False),
    "kimi_linear": lambda: tiny_kimi_linear(
        2, num_attention_heads=5, num_key_value_heads=5, v_head_dim=18, kv_lora_rank=21
    ),
    "kimi_k3": lambda: tiny_kimi_k3(2),
}  # fmt: skip
HYBRID = ("kimi_linear", "kimi_k3")


@dataclass(frozen=True)
class Captured:
    name: str
    model: nn.Module
    original: StepGraph

    def graph(self) -> StepGraph:
        """A copy that may be rewritten."""
        return self.original.copy()

    @property
    def mla_layers(self) -> list[int]:
        kinds = (
            getattr(self.model.config, "layer_types", None) or ["full_attention"] * self.model.config.num_hidden_layers
        )
        return [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]


@functools.cache
def captured_part(rank: int) -> Captured:
    """One of two parts of a Kimi-K3 that make the queries of both."""
    group = SimpleNamespace(group_name="ranks")
    model = tiny_kimi_k3(2)
    shard_model(model, ParallelLayout(tp_size=2, tp_rank=rank, tp_group=group), query_ranks=2)
    return Captured("kimi_k3", model, capture(model))


@functools.cache
def captured_model(name: str) -> Captured:
    model = MODELS[name]()
    return Captured(name, model, capture(model))
