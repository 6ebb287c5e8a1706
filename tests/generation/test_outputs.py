# SPDX-License-Identifier: Apache-2.0
"""What the caller's own objects see: criteria, streamers, scores, logits, output classes."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from tests.generation.helpers import Recorder, Scripted, prompts, sometimes_wrong, wrong

CORRUPT = {"right": lambda row, at, token: token, "sometimes_wrong": sometimes_wrong, "wrong": wrong}


class Stops(StoppingCriteria):
    """Stops a row once it has produced ``token``; keeps what it is shown."""

    def __init__(self, token: int, start: int) -> None:
        self.token, self.start = token, start
        self.seen: list = []
        self.scores: list = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.tolist())
        self.scores.append(None if scores is None else len(scores))
        return (input_ids[:, self.start :] == self.token).any(dim=1)


def run(model, inputs, token, options, draft=None):
    stops, streamer = Stops(token, inputs["input_ids"].shape[1]), Recorder()
    draft = {} if draft is None else {"assistant_model": draft}
    output = model.generate(
        **inputs, **options, **draft, stopping_criteria=StoppingCriteriaList([stops]), streamer=streamer
    )
    return output, stops, streamer


@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("lengths", [[6], [4, 7, 6]])
def test_criteria_and_streamers_see_the_calls_of_transformers(qwen, lengths, eos):
    inputs = prompts(21, lengths)
    script = qwen.continuation(inputs, 30)
    columns = inputs["input_ids"].shape[1]
    token = script[0][lengths[0] + 4]  # stops row 0 early
    other = script[-1][lengths[-1] + 7]
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": other if eos else None}
    expected, stops, streamer = run(qwen.plain, inputs, token, options)
    assert columns + 5 <= expected.shape[1] <= columns + 12
    for draft in (None, *(Scripted(script, corrupt) for corrupt in CORRUPT.values())):
        output, own_stops, own_streamer = run(qwen.compiled, inputs, token, options, draft)
        assert output.tolist() == expected.tolist()
        assert own_stops.seen == stops.seen and own_stops.scores == stops.scores
        assert own_streamer.values == streamer.values and own_streamer.ends == 1


@pytest.mark.parametrize("lengths", [[6], [4, 7, 6]])
@pytest.mark.parametrize("draft", [None, "sometimes_wrong", "right"])
def test_scores_logits_and_transition_scores(pair, lengths, draft):
    inputs = prompts(22, lengths)
    options = {
        "do_sample": False,
        "max_new_tokens": 8,
        "eos_token_id": None,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.3,
    }
    script = pair.continuation(inputs, 20, repetition_penalty=1.3)
    expected = pair.plain.generate(**inputs, **options)
    extra = {} if draft is None else {"assistant_model": Scripted(script, CORRUPT[draft])}
    output = pair.compiled.generate(**inputs, **options, **extra)
    assert type(output) is GenerateDecoderOnlyOutput and output.keys() <= expected.keys()
    assert output.sequences.tolist() == expected.sequences.tolist()
    for name in ("scores", "logits"):
        mine, theirs = getattr(output, name), getattr(expected, name)
        assert len(mine) == len(theirs) == 8
        torch.testing.assert_close(torch.stack(mine), torch.stack(theirs), atol=2e-4, rtol=1e-4)
    transition = [
        model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        for model, out in ((pair.compiled, output), (pair.plain, expected))
    ]
    torch.testing.assert_close(*transition, atol=2e-4, rtol=1e-4)


def test_scores_of_rows_that_finished(qwen):
    """Without drafts they are transformers' own (a finished row goes on with padding); with drafts they are zeros."""
    inputs = prompts(23, [5, 5])
    script = qwen.continuation(inputs, 20)
    eos = next(token for token in script[0][5:8] if token not in script[1][5:])
    options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": eos, "return_dict_in_generate": True}
    options["output_scores"] = True
    expected = qwen.plain.generate(**inputs, **options)
    output = qwen.compiled.generate(**inputs, **options)
    torch.testing.assert_close(torch.stack(output.scores), torch.stack(expected.scores), atol=2e-4, rtol=1e-4)
    drafted = qwen.compiled.generate(**inputs, **options, assistant_model=Scripted(script))
    assert drafted.sequences.tolist() == expected.sequences.tolist()
    real = torch.ones(8, 2, dtype=torch.bool)
    real[script[0][5:].index(eos) + 1 :, 0] = False
    mine, theirs = torch.stack(drafted.scores), torch.stack(expected.scores)
    torch.testing.assert_close(mine[real], theirs[real], atol=2e-4, rtol=1e-4)
    assert not mine[~real].any()


def test_outputs_only_if_asked_for(qwen):
    inputs = prompts(24, [5])
    options = {"do_sample": False, "max_new_tokens": 3}
    assert type(qwen.compiled.generate(**inputs, **options, output_scores=True)) is torch.Tensor
    output = qwen.compiled.generate(**inputs, **options, return_dict_in_generate=True)
    assert output.scores is None and output.logits is None and list(output.keys()) == ["sequences"]


@pytest.mark.parametrize("draft", [False, True])
def test_max_time_stops_all_rows_at_one_column(qwen, draft, monkeypatch):
    inputs = prompts(25, [5, 4])
    script = qwen.continuation(inputs, 30)
    now = time.time()
    clock = iter([now + i for i in range(1000)])  # one second per look
    monkeypatch.setattr("transformers.generation.stopping_criteria.time.time", lambda: next(clock))
    options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "max_time": 4.5}
    extra = {"assistant_model": Scripted(script, sometimes_wrong)} if draft else {}
    output = qwen.compiled.generate(**inputs, **options, **extra)
    assert output.shape[1] == 5 + 5
    assert [row[pad:].tolist() for row, pad in zip(output, [0, 1])] == [script[0][:10], script[1][:9]]


def test_a_finished_row_without_eos_goes_on(qwen):
    """As in transformers, only an end-of-sequence criterion pads the rows a criterion has stopped."""
    inputs = prompts(26, [5, 5])
    script = qwen.continuation(inputs, 20)
    token = script[0][5 + 1]
    assert token not in script[1][5:14]
    options = {"do_sample": False, "max_new_tokens": 9, "eos_token_id": None}
    for draft in (None, Scripted(script, sometimes_wrong)):
        output, _, _ = run(qwen.compiled, inputs, token, options, draft)
        assert output.tolist() == [row[:14] for row in script]


def test_processors_do_not_disturb_the_raw_logits(qwen):
    inputs = prompts(27, [5])
    options = {"do_sample": False, "max_new_tokens": 4, "return_dict_in_generate": True, "output_logits": True}
    options["logits_processor"] = LogitsProcessorList([lambda ids, scores: scores.masked_fill(scores > 0, -1.0)])
    expected = qwen.plain.generate(**inputs, **options)
    script = [expected.sequences[0].tolist()]
    for extra in ({}, {"assistant_model": Scripted(script)}):
        output = qwen.compiled.generate(**inputs, **options, **extra)
        assert output.sequences.tolist() == expected.sequences.tolist()
        torch.testing.assert_close(torch.stack(output.logits), torch.stack(expected.logits), atol=2e-4, rtol=1e-4)
