# SPDX-License-Identifier: Apache-2.0
"""A DSpark draft on a compiled target: its blocks equal the reference draft's, whatever was rejected before."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import dcp_compile
from dcp_compile.errors import ConfigError, UnsupportedModelError
from tests.models.k3_dspark.tiny_draft import tiny_draft
from tests.tiny_models import tiny_kimi_k3

TAPS = (1, 2, 4)
PAGES = {"block_size": 4, "max_batch_size": 3, "max_seq_len": 64, "prefill_chunk": 5, "num_speculative_tokens": 4}


def draft_for(target, seed: int = 0, **overrides):
    config = target.config
    return tiny_draft(
        seed,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        target_layer_ids=list(TAPS),
        target_num_hidden_layers=config.num_hidden_layers,
        mask_token_id=config.vocab_size - 1,
        **overrides,
    )


@pytest.fixture(scope="module")
def plain():
    return tiny_kimi_k3(layers=5)


@pytest.fixture(scope="module")
def draft(plain):
    return draft_for(plain)


@pytest.fixture(scope="module")
def optimised(draft):
    return dcp_compile.optimize(tiny_kimi_k3(layers=5), config=dcp_compile.DCPConfig(**PAGES), draft=draft)


def reference_block(plain, draft, tokens: torch.Tensor, anchor: int, count: int) -> torch.Tensor:
    """Base logits ``[count, V]`` of a block after ``tokens [n]``, with the context ingested from scratch."""
    taps = plain(tokens[None], tap_layers=TAPS).taps
    cache = DynamicCache(config=draft.config)
    draft.ingest(draft.project_context(taps), torch.arange(len(tokens))[None], cache)
    heads = plain.get_input_embeddings(), plain.get_output_embeddings()
    return draft.draft_block(torch.tensor([anchor]), len(tokens), cache, *heads, count).base_logits[0]


def test_blocks_equal_the_reference_after_prefill_and_rejection(plain, draft, optimised):
    generator = torch.Generator().manual_seed(11)
    engine, vocab = optimised._dcp.draft, plain.config.vocab_size
    rows = [torch.randint(0, vocab - 1, (n,), generator=generator) for n in (9, 1, 6)]
    with optimised._dcp_engine.open(3, 40) as session:
        session.taps_sink = engine.ingest
        session.prefill(rows)
        for kept in ([3, 1, 5], [1, 0, 2], [2, 4, 1]):
            counts = [4, 2, 3]
            anchors = torch.randint(0, vocab - 1, (3,), generator=generator)
            base, _ = engine.run_block(anchors, session.lengths, session.block_table, counts)
            for row, count in enumerate(counts):
                want = reference_block(plain, draft, rows[row], int(anchors[row]), count)
                torch.testing.assert_close(base[row, :count], want, atol=5e-4, rtol=1e-3)
            window = torch.randint(0, vocab - 1, (3, 5), generator=generator)
            session.verify(window, [count if count else 0 for count in [5, 4, 5]])
            session.commit(kept)
            rows = [torch.cat([row, window[i, : kept[i]]]) for i, row in enumerate(rows)]


@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_tokens_are_those_without_a_draft(plain, draft, optimised, batch):
    ids = torch.randint(3, 100, (batch, 7), generator=torch.Generator().manual_seed(batch))
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :5] = 0
        mask[1, :2] = 0
    options = {"attention_mask": mask, "max_new_tokens": 14, "do_sample": False, "pad_token_id": 0}
    wanted = plain.generate(ids, **options)
    assert torch.equal(optimised.generate(ids, assistant_model=draft, **options), wanted)
    assert torch.equal(optimised.generate(ids, **options), wanted)


def test_sampling_runs_and_repeats_with_the_seed(draft, optimised):
    ids = torch.randint(3, 100, (2, 5), generator=torch.Generator().manual_seed(3))
    options = {"max_new_tokens": 10, "do_sample": True, "temperature": 0.8, "top_k": 20, "pad_token_id": 0}
    outs = []
    for _ in range(2):
        torch.manual_seed(5)
        outs.append(optimised.generate(ids, assistant_model=draft, **options))
    assert torch.equal(*outs) and outs[0].shape == (2, 15)


def test_a_second_draft_replaces_the_first(plain, optimised, draft):
    ids = torch.arange(4, 12)[None]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    other = draft_for(plain, seed=1)
    assert torch.equal(optimised.generate(ids, assistant_model=other, **options), plain.generate(ids, **options))
    assert optimised._dcp.draft.model is other
    dcp_compile.drafting.prepare_draft(optimised, draft)


def test_drafts_that_do_not_fit_are_refused(plain, optimised):
    wrong = draft_for(plain)
    wrong.config.target_num_hidden_layers = 93
    with pytest.raises(ConfigError, match="93"):
        optimised.generate(torch.arange(4)[None], assistant_model=wrong, max_new_tokens=2, do_sample=False)
    with pytest.raises((UnsupportedModelError, dcp_compile.GenerationError), match="eval"):
        optimised.generate(torch.arange(4)[None], assistant_model=draft_for(plain).train(), max_new_tokens=2)
