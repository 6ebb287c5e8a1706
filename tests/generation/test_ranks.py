# SPDX-License-Identifier: Apache-2.0
"""The leader decides: another rank with other random numbers, clocks, drafts and roundings gives the same answer."""

from __future__ import annotations

import pytest
import torch
from transformers import MaxTimeCriteria, StoppingCriteriaList, TextIteratorStreamer, TextStreamer

from dcp_compile.generation.patch import attach
from tests.generation.helpers import Recorder, prompts, tiny_qwen3
from tests.generation.reference_engine import ReferenceEngine, ReferenceSession


class RankEngine(ReferenceEngine):
    """The leader of a group of two records what it broadcasts; the follower receives that."""

    def __init__(self, model, tape: list, is_leader: bool) -> None:
        super().__init__(model)
        self.tape = tape
        self.is_leader = is_leader

    def open(self, batch, max_length, given=dict):
        self.opened += 1
        return RankSession(self, batch, max_length)


class RankSession(ReferenceSession):
    def __init__(self, engine, batch, max_length) -> None:
        super().__init__(engine, batch, max_length)
        self.is_leader = engine.is_leader

    def broadcast(self, tensor):
        tape = self._engine.tape
        if self.is_leader:
            tape.append(tensor.clone())
            return tensor
        sent = tape.pop(0)
        assert sent.shape == tensor.shape and sent.dtype == tensor.dtype
        return sent.clone()


def rank(tape, is_leader, noise=0.0):
    model = tiny_qwen3()
    if noise:
        with torch.no_grad():
            model.lm_head.weight += noise * torch.randn_like(model.lm_head.weight)
    attach(model, RankEngine(model, tape, is_leader))
    return model


DRAFTS = {
    "plain": lambda seed: {},
    "model": lambda seed: {"assistant_model": tiny_qwen3(seed), "num_assistant_tokens": 3},
    "lookup": lambda seed: {"prompt_lookup_num_tokens": 3},
    "lockstep": lambda seed: {
        "assistant_model": tiny_qwen3(seed),
        "num_assistant_tokens": 3,
        "repetition_penalty": 1.4,
    },
    "block": lambda seed: {"assistant_model": tiny_qwen3(seed), "num_assistant_tokens": 3, "acceptance": "block"},
}


CASES = [(draft, do_sample) for draft in DRAFTS for do_sample in (False, True) if do_sample or draft != "block"]


@pytest.mark.parametrize(("draft", "do_sample"), CASES)
def test_a_follower_gives_the_leaders_answer(draft, do_sample):
    inputs = prompts(31, [4, 6])
    options = (
        {"do_sample": do_sample, "max_new_tokens": 12, "temperature": 2.0} if do_sample else {"max_new_tokens": 12}
    )
    options.update(eos_token_id=list(range(3, 12)), return_dict_in_generate=True, output_scores=True)
    tape, streamers = [], (Recorder(), Recorder())
    torch.manual_seed(1)
    leader = rank(tape, True)
    expected = leader.generate(**inputs, **options, **DRAFTS[draft](0), streamer=streamers[0])
    torch.manual_seed(2)
    follower = rank(tape, False, noise=0.05)
    # Its draft differs too, so that even the shapes it would propose need not agree.
    output = follower.generate(**inputs, **options, **DRAFTS[draft](5), streamer=streamers[1])
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert len(output.scores) == len(expected.scores) and not tape
    assert streamers[0].values and streamers[0].ends == 1
    assert not streamers[1].values and streamers[1].ends == 1  # a thread may wait for it


def test_a_followers_text_streamers_show_nothing(tokenizer, capsys):
    """One that a thread iterates over comes to its end, one that prints stays silent."""
    inputs, tape = prompts(31, [4]), []
    rank(tape, True).generate(**inputs, max_new_tokens=3, do_sample=False)
    follower, iterated = rank(tape, False), TextIteratorStreamer(tokenizer, timeout=5)
    tape += [tensor.clone() for tensor in tape]
    follower.generate(**inputs, max_new_tokens=3, do_sample=False, streamer=iterated)
    assert "".join(iterated) == ""
    follower.generate(**inputs, max_new_tokens=3, do_sample=False, streamer=TextStreamer(tokenizer))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("leader_stops", [True, False])
def test_the_leaders_clock_decides(leader_stops):
    inputs = prompts(32, [4, 6])
    tape = []
    long, short = (StoppingCriteriaList([MaxTimeCriteria(limit, initial_timestamp=0.0)]) for limit in (1e18, 1.0))
    options = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": None}
    expected = rank(tape, True).generate(**inputs, **options, stopping_criteria=short if leader_stops else long)
    output = rank(tape, False).generate(**inputs, **options, stopping_criteria=long if leader_stops else short)
    assert output.tolist() == expected.tolist() and output.shape[1] == 6 + (1 if leader_stops else 5)
