# SPDX-License-Identifier: Apache-2.0
"""A draft with grouped-query attention on a compiled target. On several ranks: see test_drafting.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

import dcp_compile
from dcp_compile.runtime.replicated import replicated_block
from tests.distributed.drafting import check_window
from tests.generation.helpers import prompts
from tests.models.k3_dspark.tiny_gqa_draft import gqa_draft
from tests.tiny_models import tiny_kimi_k3

TAPS = [1, 2, 4]


@pytest.mark.parametrize("kind", ["grouped", "grouped causal"])
def test_blocks_see_the_window_and_themselves(kind: str, fresh_seed: int) -> None:
    """Ragged contexts in pages of 4 with NaN wherever nothing was written."""
    windows = [1, 3, 4, 9, 26, 40, None]
    assert check_window(seed=fresh_seed, kind=kind, windows=windows, dcp_size=1) < 1e-9


def test_it_keeps_its_dtype_beside_a_float8_cache(fresh_seed: int) -> None:
    cache = {"kv_cache_dtype": "float8_e4m3fn", "kv_cache_scale": 2.0**-5}
    assert check_window(seed=fresh_seed, kind="grouped", windows=[9, None], dcp_size=1, **cache) < 1e-9


def test_rows_that_are_left_out_widen_no_window() -> None:
    class Step(nn.Module):
        config = SimpleNamespace(num_key_value_heads=1)

        def forward(self, ids, positions, cache, attention_mask):
            self.seen = attention_mask.tolist()
            return CausalLMOutputWithPast(logits=torch.zeros(*ids.shape, 3), hidden_states=torch.zeros(*ids.shape, 2))

    step = Step()
    rows = torch.tensor([[30, 31], [-1, -1], [2, 3]])
    inputs = {"positions": rows, "row_positions": rows, "input_ids": torch.zeros_like(rows).flatten()}
    table = torch.arange(1, 25).view(3, 8)
    replicated_block(step, [torch.randn(25, 4, 2)], window=5)({**inputs, "block_table": table})
    assert step.seen == [[True] * 7, [False] * 7, [True, True, False, False, False, True, True]]


def draft_for(config, seed: int, **overrides):
    return gqa_draft(
        seed,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        dflash_config={"mask_token_id": config.vocab_size - 1, "target_layer_ids": TAPS},
        num_target_layers=config.num_hidden_layers,
        **overrides,
    )


@pytest.mark.parametrize("settings", [{}, {"draft_window": 6, "verify": "adaptive"}])
def test_tokens_are_those_without_a_draft(settings: dict, fresh_seed: int) -> None:
    plain = tiny_kimi_k3(layers=5)
    config = dcp_compile.DCPConfig(block_size=4, max_batch_size=3, max_seq_len=64, num_speculative_tokens=4, **settings)
    draft = draft_for(plain.config, fresh_seed)
    optimised = dcp_compile.optimize(tiny_kimi_k3(layers=5), config=config, draft=draft)
    options = {**prompts(fresh_seed, [9, 1, 6]), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(optimised.generate(assistant_model=draft, **options), plain.generate(**options))
    text = dcp_compile.explain(optimised)
    assert "run as it is, with all keys and values of its 2 layers on every rank" in text
    assert "rounds of draft and verify: each waits for the host" in text
    dcp_compile.unoptimize(optimised)
