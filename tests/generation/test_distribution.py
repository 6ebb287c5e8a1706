# SPDX-License-Identifier: Apache-2.0
"""Sampling with drafts keeps the distribution, against the exact law of a Markov chain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dcp_compile.generation.call import DecodeCall
from dcp_compile.generation.loop import decode_speculative
from dcp_compile.generation.patch import attach
from tests.generation.helpers import chi_square_p, tiny_qwen3
from tests.generation.markov import MarkovDraft, MarkovEngine


def markov_chain(warpers):
    """An engine on a random Markov chain over 6 tokens, a similar table for drafts, and the exact law of three tokens
    after token 4."""
    engine = MarkovEngine(torch.randn(6, 6) * 1.5)
    draft_table = engine.table + torch.randn(6, 6) * 0.7
    table = warpers(None, engine.table).softmax(-1)
    exact = table[4]
    for _ in range(2):
        exact = exact[..., None] * table
    return engine, draft_table, exact


@pytest.mark.parametrize("acceptance", ["standard", "block"])
@pytest.mark.parametrize("one_hot", [False, True])
def test_sampling_with_drafts_keeps_the_distribution(one_hot, acceptance):
    torch.manual_seed(41)
    engine, draft_table, exact = markov_chain(
        LogitsProcessorList([TemperatureLogitsWarper(1.2), TopKLogitsWarper(5), TopPLogitsWarper(0.97)])
    )
    model = tiny_qwen3(vocab_size=6)
    attach(model, engine)
    counts = torch.zeros(6, 6, 6)
    for _ in range(8):
        output = model.generate(
            torch.tensor([[3, 4]]),
            do_sample=True,
            eos_token_id=None,
            max_new_tokens=5,
            num_return_sequences=500,
            num_assistant_tokens=3,
            assistant_model=MarkovDraft(draft_table, one_hot),
            acceptance=acceptance,
            temperature=1.2,
            top_k=5,
            top_p=0.97,
        )
        counts.index_put_(tuple(output[:, 2:5].T), torch.tensor(1.0), accumulate=True)
    assert 0.2 < engine.accepted / engine.drafted < 0.9
    assert chi_square_p(counts, exact) > 1e-3


def over(*tokens: int) -> Tensor:
    """A table of logits after which these tokens are equally likely, whatever came before."""
    return torch.full((6, 6), -30.0).index_fill_(1, torch.tensor(tokens), 0.0)


@pytest.mark.parametrize("acceptance", ["standard", "block"])
@pytest.mark.parametrize("rows, eos, drafted", [
    (1, None, None), (2, None, None), (3, None, None), (2, None, (1, 3)), (4, None, (1, 3)), (2, 1, (1, 2, 3)), (4, 1, (1, 2, 3)),
])  # fmt: skip
def test_rows_in_lockstep_keep_the_distribution(rows, eos, drafted, acceptance):
    """A processor that is not known to read scores only makes the rows of a batch advance together; so does one that
    forbids a draft outright. With ``drafted`` the model chooses between 1 and 2, and drafts are now and then a 3, which it
    forbids: whether one row's draft counts may depend on the other rows' drafts only, also where a row may end."""
    torch.manual_seed(42)
    warpers = LogitsProcessorList([lambda ids, scores: scores.masked_fill(scores < -1.0, -torch.inf)])
    engine, draft_table, exact = markov_chain(warpers)
    if drafted:
        engine, draft_table, exact = MarkovEngine(over(1, 2)), over(*drafted), torch.zeros(6, 6, 6)
        exact[1:3, 1:3, 1:3] = 1 / 8
    if eos is not None:  # pads follow
        for first in range(6):
            ended = exact[first, eos].sum()
            exact[first, eos], exact[first, eos, 0] = 0.0, ended
        ended = exact[eos].sum()
        exact[eos], exact[eos, 0, 0] = 0.0, ended
    call = DecodeCall(
        input_ids=torch.tensor([[3, 4]]).expand(rows, 2),
        prompts=[torch.tensor([3, 4])] * rows,
        pads=[0] * rows,
        max_length=7,
        pad_token=0,
        eos_tokens=frozenset() if eos is None else frozenset({eos}),
        pads_finished=eos is not None,
        processors=warpers,
        criteria=StoppingCriteriaList([MaxLengthCriteria(7), *([] if eos is None else [EosTokenCriteria(eos)])]),
        do_sample=True,
        return_dict=False,
        scores=False,
        logits=False,
        streamer=None,
        vocab_size=6,
    )
    counts = torch.zeros(6, 6, 6)
    for _ in range(2000 // rows):
        session = engine.open(rows, 7)
        output = decode_speculative(session, call, MarkovDraft(draft_table, one_hot=False), 3, acceptance)
        output = torch.nn.functional.pad(output, (0, 7 - output.shape[1]))
        counts.index_put_(tuple(output[:, 2:5].T), torch.tensor(1.0), accumulate=True)
    least = 0.02 if drafted else 0.05  # the slowest of four rows, half of whose drafts are forbidden
    assert least < engine.accepted / engine.drafted < 0.9
    assert chi_square_p(counts, exact) > 1e-3
