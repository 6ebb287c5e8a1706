# SPDX-License-Identifier: Apache-2.0
"""A DSpark draft on a compiled target: its blocks equal the reference draft's, whatever was rejected before."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import dcp_compile
from dcp_compile.errors import CapacityError, ConfigError, UnsupportedModelError
from tests.generation.helpers import Scripted, prompts, sometimes_wrong
from tests.models.k3_dspark.tiny_draft import draft_for
from tests.tiny_models import tiny_kimi_k3

TAPS = (1, 2, 4)
PAGES = {"block_size": 4, "max_batch_size": 3, "max_seq_len": 64, "prefill_chunk": 5, "num_speculative_tokens": 4}


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
            lengths = torch.tensor(session.lengths)
            base, _ = engine.run_block(anchors, lengths, session.block_table, torch.tensor(counts), 4)
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


def ask(model, draft, length: int = 8, **options):
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **options}
    extra = {} if draft is None else {"assistant_model": draft}
    return model.generate(torch.arange(4, 4 + length)[None], **extra, **options)


def test_rows_end_inside_an_accepted_block(plain, optimised):
    """Three ragged rows whose right drafts reach past the tokens that end them."""
    inputs = prompts(3, [6, 2, 5])
    options = {"do_sample": False, "max_new_tokens": 14, "pad_token_id": 0}
    free = plain.generate(**inputs, **options, eos_token_id=None)
    ends = [int(free[row, 6 + column]) for row, column in ((0, 2), (1, 6), (2, 9))]
    wanted = plain.generate(**inputs, **options, eos_token_id=ends)
    pads = (inputs["attention_mask"] == 0).sum(dim=1).tolist()
    script = [row[pad:].tolist() for row, pad in zip(free, pads)]
    for drafts in (Scripted(script), Scripted(script, sometimes_wrong)):
        assert torch.equal(optimised.generate(**inputs, **options, eos_token_id=ends, assistant_model=drafts), wanted)


def test_fewer_tokens_than_the_draft_was_trained_for_and_more(plain, optimised, draft):
    """A block is as long as asked, up to what the draft was trained for; prompt lookup may use the rest."""
    assert draft.config.block_size == 7 and optimised._dcp.draft.width == 4  # num_speculative_tokens
    wanted = ask(plain, None)
    assert torch.equal(ask(optimised, draft, num_assistant_tokens=2), wanted)
    assert torch.equal(ask(optimised, draft, num_assistant_tokens=1), wanted)
    config = optimised._dcp.config
    engine = optimised._dcp_engine
    short = draft_for(plain, block_size=3)
    compiled, _ = dcp_compile.compiler.compile_draft(short, optimised, engine)
    assert (compiled.width, config.num_speculative_tokens) == (3, 4)


def test_requests_may_fill_the_last_position(plain, optimised, draft):
    """max_seq_len is 64: prompts that leave 1 to 6 tokens, drafts of 4; one token more is refused."""
    for length in (63, 60, 58):
        wanted = ask(plain, None, length, max_new_tokens=64 - length)
        assert torch.equal(ask(optimised, draft, length, max_new_tokens=64 - length), wanted)
    free = optimised._dcp_engine.pages.available
    with pytest.raises(CapacityError, match="65 tokens .* do not fit: max_seq_len is 64"):
        ask(optimised, draft, 60, max_new_tokens=5)
    with pytest.raises(CapacityError, match="a batch of 4 does not fit: max_batch_size is 3"):
        ask(optimised, draft, num_return_sequences=4, do_sample=True)
    assert optimised._dcp_engine.pages.available == free


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


def test_a_call_without_room_compiles_no_draft(plain, optimised):
    """The limits are those of every engine: neither draft nor target is compiled for a call that neither could run."""
    before = optimised._dcp_engine, optimised._dcp.draft
    config = optimised._dcp.config
    other, rows = draft_for(plain, seed=5, taps=(0, 3)), config.max_batch_size + 1
    for ids, count in ((torch.arange(4)[None], config.max_seq_len), (torch.arange(4).repeat(rows, 1), 2)):
        with pytest.raises(dcp_compile.CapacityError, match="do(es)? not fit: max_"):
            optimised.generate(ids, assistant_model=other, max_new_tokens=count, do_sample=False)
    assert (optimised._dcp_engine, optimised._dcp.draft) == before


def test_a_draft_with_other_taps_comes_later(plain, optimised, monkeypatch):
    """The target is compiled again for its taps; if the draft itself cannot be compiled, nothing has changed."""
    other = draft_for(plain, seed=2, taps=(0, 3))
    assert torch.equal(ask(optimised, other), ask(plain, None))
    assert optimised._dcp_engine.tap_layers == (0, 3) and optimised._dcp.draft.model is other
    broken = draft_for(plain, taps=(1,))
    broken.layers[0].self_attn.forward = lambda x, *rest: x  # no attention to compile
    before = optimised._dcp_engine, optimised._dcp.draft, optimised._dcp.report
    monkeypatch.setattr(dcp_compile.drafting, "compile_model", lambda *arguments: (before[0], None))
    with pytest.raises(UnsupportedModelError, match="DraftStep: expected one latent call in each of the layers"):
        ask(optimised, broken)
    assert (optimised._dcp_engine, optimised._dcp.draft, optimised._dcp.report) == before
