# SPDX-License-Identifier: Apache-2.0
"""generate() on an engine gives, token for token, what transformers gives; with and without drafts."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
)

from dcp_compile.errors import CapacityError
from dcp_compile.generation import api
from tests.generation.helpers import (
    PAD,
    Scripted,
    fresh_seeds,
    prompts,
    sometimes_wrong,
    wrong,
)
from tests.tiny_models import VOCAB

NEW = 14
GREEDY = {
    "greedy": {},
    "max_length": {"max_length": 15, "max_new_tokens": None},
    "one_token": {"max_new_tokens": 1},
    "two_tokens": {"max_new_tokens": 2},
    "no_eos": {"eos_token_id": None},
    "repetition": {"repetition_penalty": 1.6},
    "ngram": {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2},
    "encoder_repetition": {"encoder_repetition_penalty": 1.8},
    "minimum": {"min_new_tokens": 6, "eos_token_id": list(range(3, 60))},
    "min_length": {"min_length": 12, "eos_token_id": list(range(3, 60))},
    "words": {"bad_words_ids": [[12], [5, 6]], "sequence_bias": {(17,): 3.0, (21, 22): -4.0}},
    "suppress": {"suppress_tokens": list(range(40, 100)), "begin_suppress_tokens": [7, 8, 9]},
    "forced": {"forced_eos_token_id": 2, "eos_token_id": 2},
    "decay": {"exponential_decay_length_penalty": (4, 1.7), "eos_token_id": 2},
    "invalid_values": {"remove_invalid_values": True, "renormalize_logits": True},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.0)},
    "prefix_fn": {
        "prefix_allowed_tokens_fn": lambda row, ids: [t for t in range(3, VOCAB) if (t + row + int(ids[-1])) % 3]
    },
}
SAMPLING = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top_k_p": {"top_k": 12, "top_p": 0.9},
    "min_p": {"min_p": 0.02, "top_k": 0},
    "typical": {"typical_p": 0.8, "epsilon_cutoff": 0.002, "eta_cutoff": 0.002},
    "top_h": {"top_h": 0.5, "top_k": 0},
    "with_context": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "top_k": 20},
}
BATCHES = {"one": [6], "ragged": [4, 7, 6]}


def eos_of(pair, inputs) -> list[int]:
    """Tokens that end the rows of a batch at different columns."""
    rows = pair.continuation(inputs, NEW)
    lengths = inputs["attention_mask"].sum(dim=1).tolist()
    return sorted({row[length + 3 * i + 1] for i, (row, length) in enumerate(zip(rows, lengths))})


def both(pair, inputs, options, **draft):
    options = {"do_sample": False, "max_new_tokens": NEW, **options}
    return pair.plain.generate(**inputs, **options), pair.compiled.generate(**inputs, **options, **draft)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", GREEDY)
def test_greedy_equals_transformers(qwen, name, batch):
    inputs = prompts(1, BATCHES[batch])
    expected, plain = both(qwen, inputs, GREEDY[name])
    assert plain.tolist() == expected.tolist()
    # A draft that knows the answer but errs at different columns in each row.
    script = [row[pad:].tolist() for row, pad in zip(expected, (inputs["attention_mask"] == 0).sum(1).tolist())]
    _, drafted = both(qwen, inputs, GREEDY[name], assistant_model=Scripted(script, sometimes_wrong))
    assert drafted.tolist() == expected.tolist()


@pytest.mark.parametrize("batch", BATCHES)
def test_end_of_sequence_and_padding(pair, batch):
    inputs = prompts(2, BATCHES[batch])
    eos = eos_of(pair, inputs)
    for ends in (eos, eos[0]):
        expected, plain = both(pair, inputs, {"eos_token_id": ends})
        assert plain.tolist() == expected.tolist()
        assert batch == "one" or PAD in expected[:, inputs["input_ids"].shape[1] :]
        script = pair.continuation(inputs, NEW + 9)
        for corrupt in (lambda row, at, token: token, sometimes_wrong, wrong):
            draft = Scripted(script, corrupt)
            _, drafted = both(pair, inputs, {"eos_token_id": ends}, assistant_model=draft)
            assert drafted.tolist() == expected.tolist()
            assert draft.calls[-1] == "close" and draft.calls[0] == "begin"


@pytest.mark.parametrize("batch", BATCHES)
def test_real_drafts(pair, batch):
    inputs = prompts(3, BATCHES[batch])
    expected = pair.plain.generate(**inputs, do_sample=False, max_new_tokens=9)
    for draft in (
        {"assistant_model": pair.make(seed=4), "num_assistant_tokens": 3},
        {"assistant_model": pair.plain, "num_assistant_tokens": 3},
        {"prompt_lookup_num_tokens": 4},
        {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1},
    ):
        before = pair.engine.accepted
        output = pair.compiled.generate(**inputs, do_sample=False, max_new_tokens=9, **draft)
        assert output.tolist() == expected.tolist()
        if draft.get("assistant_model") is pair.plain:  # its drafts are the target's own choices: 2 rounds of 3, 1 of 0
            assert pair.engine.accepted - before == 6 * len(expected)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_draws_what_transformers_draws(qwen, name, batch):
    inputs = prompts(4, BATCHES[batch])
    options = {"do_sample": True, "max_new_tokens": NEW, "eos_token_id": list(range(3, 9)), **SAMPLING[name]}
    torch.manual_seed(11)
    expected = qwen.plain.generate(**inputs, **options)
    torch.manual_seed(11)
    assert qwen.compiled.generate(**inputs, **options).tolist() == expected.tolist()


def test_sampling_with_a_recurrent_model(kimi):
    inputs = prompts(5, [3, 6])
    options = {"do_sample": True, "max_new_tokens": 10, "num_return_sequences": 2, "temperature": 0.9}
    torch.manual_seed(12)
    expected = kimi.plain.generate(**inputs, **options)
    torch.manual_seed(12)
    assert kimi.compiled.generate(**inputs, **options).tolist() == expected.tolist()


@pytest.mark.parametrize("seed", fresh_seeds("generate", 4))
def test_any_batch_any_draft(qwen, seed):
    """Random prompts, ends, lengths and draft errors; with and without a processor that needs lock-step."""
    draw = random.Random(seed)
    inputs = prompts(seed, [draw.randrange(1, 9) for _ in range(draw.randrange(1, 5))])
    context = {"repetition_penalty": 1.2} if draw.random() < 0.5 else {}
    script = qwen.continuation(inputs, 25, **context)
    options = {
        "do_sample": False,
        "max_new_tokens": draw.randrange(1, 22),
        "eos_token_id": draw.sample(range(3, VOCAB), 6),
    }
    expected = qwen.plain.generate(**inputs, **options, **context)
    rate = draw.random()
    draft = Scripted(script, lambda row, at, token: wrong(row, at, token) if draw.random() < rate else token)
    width = draw.randrange(1, 8)
    output = qwen.compiled.generate(**inputs, **options, **context, assistant_model=draft, num_assistant_tokens=width)
    assert output.tolist() == expected.tolist()
    assert qwen.compiled.generate(**inputs, **options, **context).tolist() == expected.tolist()


def test_ragged_acceptance_and_finished_rows(kimi):
    """Every row gets its own pace: one always accepts, one never, one ends early."""
    inputs = prompts(6, [5, 5, 5])
    script = kimi.continuation(inputs, 30)
    eos = script[2][5 + 2]
    assert all(eos not in row[5:] for row in script[:2])
    draft = Scripted(script, lambda row, at, token: wrong(row, at, token) if row == 1 else token)
    options = {"do_sample": False, "max_new_tokens": 13, "eos_token_id": eos}
    expected = kimi.plain.generate(**inputs, **options)
    assert kimi.compiled.generate(**inputs, **options, assistant_model=draft, num_assistant_tokens=3).tolist() == (
        expected.tolist()
    )
    # Row 0: 12 tokens in three rounds of 4. Row 1: one at a time. Row 2: stops inside its first round.
    assert [kept[0] for kept in draft.kept] == [4, 4, 4] + [0] * 9
    assert [kept[1] for kept in draft.kept] == [1] * 12
    assert [kept[2] for kept in draft.kept] == [2] + [0] * 11
    assert [limits[1] for limits in draft.limits] == [3] * 9 + [2, 1, 0]
    assert all(limits[2] == 0 for limits in draft.limits[1:])


def test_finished_rows_are_not_fed(qwen):
    inputs = prompts(6, [5, 5, 5])
    script = [row[5:] for row in qwen.continuation(inputs, 12)]
    eos = script[2][3]
    ends = [row.index(eos) if eos in row else 11 for row in script]
    assert max(ends) == 11 and ends[2] <= 3
    before = qwen.engine.fed
    qwen.compiled.generate(**inputs, do_sample=False, max_new_tokens=12, eos_token_id=eos)
    assert qwen.engine.fed - before == sum(ends)


def test_drafts_never_reach_past_the_last_token(qwen):
    """With 1 .. 4 tokens to go, a draft is cut so that nothing is fed beyond them."""
    inputs = prompts(7, [5])
    script = qwen.continuation(inputs, 40)
    for count in range(1, 6):
        qwen.engine.longest = 0
        draft = Scripted(script)
        output = qwen.compiled.generate(**inputs, do_sample=False, max_new_tokens=count, assistant_model=draft)
        assert output[0].tolist() == script[0][: 5 + count]
        assert qwen.engine.longest <= 5 + count - 1
        assert draft.limits == ([[count - 2]] if count > 1 else [])


@pytest.mark.parametrize("fits", [True, False])
def test_capacity_is_the_length_of_a_row_without_padding(qwen, fits, monkeypatch):
    inputs = prompts(8, [4, 9])
    options = {"do_sample": False, "max_new_tokens": 11 if fits else 12, "eos_token_id": None}
    monkeypatch.setattr(qwen.engine, "max_length", 20)
    if fits:
        assert qwen.compiled.generate(**inputs, **options).shape == (2, 20)
        # Both rows padded: the longest one has 20 tokens, the batch 22 columns.
        ids = torch.nn.functional.pad(inputs["input_ids"], (2, 0))
        mask = torch.nn.functional.pad(inputs["attention_mask"], (2, 0))
        assert qwen.compiled.generate(ids, attention_mask=mask, **options).shape == (2, 22)
    else:
        with pytest.raises(CapacityError, match="21"):
            qwen.compiled.generate(**inputs, **options)


def test_number_of_drafts_is_the_least_asked_for(qwen):
    inputs = prompts(9, [5])
    script = qwen.continuation(inputs, 40)

    def widest(**options) -> int:
        draft = Scripted(script)
        if "own" in options:
            draft.generation_config = GenerationConfig(num_assistant_tokens=options.pop("own"))
        qwen.compiled.generate(**inputs, do_sample=False, max_new_tokens=20, assistant_model=draft, **options)
        return max(limits[0] for limits in draft.limits)

    assert widest() == qwen.engine.max_query_rows - 1 == 7
    assert widest(num_assistant_tokens=2) == 2
    assert widest(own=3) == 3
    assert widest(own=3, num_assistant_tokens=5) == 3
    assert widest(num_assistant_tokens=50) == 7


def test_prompts_without_mask_and_without_batching(qwen):
    ids = prompts(10, [6])["input_ids"]
    for arguments in ({"inputs": ids}, {"input_ids": ids}):
        expected = qwen.plain.generate(**arguments, do_sample=False, max_new_tokens=5)
        assert qwen.compiled.generate(**arguments, do_sample=False, max_new_tokens=5).tolist() == expected.tolist()
    padded = torch.tensor([[PAD, PAD, 9, 8], [5, 6, 7, 8]])  # the mask is inferred from the pad token
    expected = qwen.plain.generate(padded, do_sample=False, max_new_tokens=5)
    assert qwen.compiled.generate(padded, do_sample=False, max_new_tokens=5).tolist() == expected.tolist()
    ids = padded[1:].int()
    expected = qwen.plain.generate(ids, do_sample=False, max_new_tokens=5)
    output = qwen.compiled.generate(ids, do_sample=False, max_new_tokens=5)
    assert output.tolist() == expected.tolist() and output.dtype == expected.dtype
    expected = qwen.plain.generate(do_sample=False, max_new_tokens=5)  # from bos
    assert qwen.compiled.generate(do_sample=False, max_new_tokens=5).tolist() == expected.tolist()


def test_generation_config_objects_and_defaults(qwen):
    inputs = prompts(11, [6, 4])
    config = GenerationConfig(
        max_new_tokens=7, do_sample=False, repetition_penalty=1.4, eos_token_id=2, pad_token_id=PAD
    )
    expected = qwen.plain.generate(**inputs, generation_config=config)
    assert qwen.compiled.generate(**inputs, generation_config=config).tolist() == expected.tolist()
    assert qwen.compiled.generate(inputs["input_ids"], config, attention_mask=inputs["attention_mask"]).tolist() == (
        expected.tolist()
    )
    assert qwen.compiled.generate(**inputs).tolist() == qwen.plain.generate(**inputs).tolist()  # 20 new tokens


def test_the_callers_own_length_criterion_wins(qwen):
    inputs = prompts(12, [6])
    script = qwen.continuation(inputs, 40)
    for limit in (4, 9, 16):  # shorter than the prompt: one token, then the criterion is met
        options = {
            "do_sample": False,
            "max_new_tokens": 5,
            "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(limit)]),
        }
        expected = qwen.plain.generate(**inputs, **options)
        assert expected.shape[1] == max(limit, 7)
        assert qwen.compiled.generate(**inputs, **options).tolist() == expected.tolist()
        assert (
            qwen.compiled.generate(**inputs, **options, assistant_model=Scripted(script)).tolist() == expected.tolist()
        )


class Seen(LogitsProcessor):
    """Changes scores by row, length and last token, and keeps what it was shown."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids, scores):
        assert len(input_ids) == len(scores)
        self.seen.append(input_ids.tolist())
        shift = torch.arange(scores.shape[1]) * (1 + torch.arange(len(scores))[:, None]) + input_ids.shape[1]
        return scores + 0.2 * torch.sin(shift * (1 + input_ids[:, -1:]))


@pytest.mark.parametrize("batch", BATCHES)
def test_custom_processors_see_the_calls_of_transformers(qwen, batch):
    inputs = prompts(13, BATCHES[batch])
    options = {"do_sample": False, "max_new_tokens": 10}
    seen = [Seen() for _ in range(3)]
    free = qwen.plain.generate(**inputs, **options, eos_token_id=None, logits_processor=LogitsProcessorList([Seen()]))
    options["eos_token_id"] = [int(free[0, -6])]
    expected = qwen.plain.generate(**inputs, **options, logits_processor=LogitsProcessorList([seen[0]]))
    plain = qwen.compiled.generate(**inputs, **options, logits_processor=LogitsProcessorList([seen[1]]))
    assert plain.tolist() == expected.tolist() and seen[1].seen == seen[0].seen
    script = [row[pad:].tolist() for row, pad in zip(free, (inputs["attention_mask"] == 0).sum(1).tolist())]
    drafted = qwen.compiled.generate(
        **inputs,
        **options,
        logits_processor=LogitsProcessorList([seen[2]]),
        assistant_model=Scripted(script, sometimes_wrong),
    )
    assert drafted.tolist() == expected.tolist()
    assert [ids for ids in seen[2].seen if ids in seen[0].seen] == seen[
        2
    ].seen  # no prefix plain decoding does not show


def test_function_form(qwen):
    inputs = prompts(14, [5])
    expected = qwen.plain.generate(**inputs, do_sample=False, max_new_tokens=5)
    options = {"do_sample": False, "max_new_tokens": 5, "attention_mask": inputs["attention_mask"]}
    draft = Scripted(qwen.continuation(inputs, 9))
    assert api.generate(qwen.compiled, inputs["input_ids"], **options).tolist() == expected.tolist()
    assert (
        api.generate(qwen.compiled, inputs["input_ids"], assistant_model=draft, **options).tolist() == expected.tolist()
    )
    assert api.generate(qwen.compiled, input_ids=inputs["input_ids"], **options).tolist() == expected.tolist()
