# SPDX-License-Identifier: Apache-2.0
"""Rounds that do not wait for the host: the tokens of those that do, and nothing in them that waits."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import dcp_compile
from dcp_compile.errors import RankError
from dcp_compile.generation.ahead import Rounds, why_wait
from dcp_compile.generation.drafts import Sampling
from dcp_compile.generation.dspark import DSparkProposer
from dcp_compile.runtime import Session
from dcp_compile.runtime.costs import StepCosts
from tests.distributed.drafting import check_sampling
from tests.generation.helpers import Recorder, fresh_seeds
from tests.models.k3_dspark.tiny_draft import draft_for
from tests.runtime.reference import MODELS, Reference, calm_kimi_k3, decode_by_transformers
from tests.tiny_models import VOCAB

LENGTHS = [6, 2, 9]
STEPS = 24
WIDTHS = [1, 4, 7]


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model as transformers runs it, the same behind an engine, its draft, and where transformers goes from prompts."""

    plain: Any
    optimised: Any
    draft: Any
    reference: Reference

    def inputs(self, rows: list[int]) -> dict[str, Tensor]:
        prompts = [self.reference.prompts[row] for row in rows]
        columns = max(map(len, prompts))
        padded = torch.stack([torch.nn.functional.pad(prompt, (columns - len(prompt), 0)) for prompt in prompts])
        pads = torch.tensor([columns - len(prompt) for prompt in prompts])
        return {"input_ids": padded, "attention_mask": (torch.arange(columns) >= pads[:, None]).long()}

    def generate(self, rows: list[int], **options: Any) -> Any:
        options = {"do_sample": False, "pad_token_id": 0, **self.inputs(rows), **options}
        return self.optimised.generate(assistant_model=self.draft, **options)

    def expected(self, rows: list[int], **options: Any) -> Any:
        return self.plain.generate(**{"do_sample": False, "pad_token_id": 0, **self.inputs(rows), **options})

    @property
    def rounds(self) -> int:
        return self.optimised._dcp_engine.verify_steps


@pytest.fixture(scope="module", params=fresh_seeds("ahead", 1))
def setup(request) -> Setup:
    seed = request.param
    plain, compiled = (calm_kimi_k3(3, seed=seed) for _ in range(2))
    plain.generation_config.eos_token_id = compiled.generation_config.eos_token_id = None
    draft = draft_for(plain, (0, 1), seed)
    config = dcp_compile.DCPConfig(block_size=4, max_batch_size=3, max_seq_len=64, num_speculative_tokens=max(WIDTHS))
    optimised = dcp_compile.optimize(compiled, config=config, draft=draft)
    return Setup(plain, optimised, draft, decode_by_transformers(plain, LENGTHS, STEPS, seed))


@pytest.fixture
def launched(monkeypatch) -> list[list[bool]]:
    """The rows of every round that is launched; no row is ever fed past its last token but one."""
    rounds: list[list[bool]] = []
    launch, verify = Rounds.launch, Session.verify_ahead

    def counted(self, wanted):
        rounds.append(list(wanted))
        self._session.limits = self._limits
        return launch(self, wanted)

    def checked(self, tokens, counts, requests):
        assert ((counts == 0) | (requests.lengths + counts <= self.limits)).all()
        return verify(self, tokens, counts, requests)

    monkeypatch.setattr(Rounds, "launch", counted)
    monkeypatch.setattr(Session, "verify_ahead", checked)
    return rounds


RIGHT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "oracle": lambda row, at: row >= 0,
    "adversary": lambda row, at: row < 0,
    "sometimes": lambda row, at: at * (row + 2) % (3 + row) > 0,
}


def draw_from_script(monkeypatch, setup: Setup, rows: list[int], kind: str) -> None:
    """Let the draft propose what follows in the reference, right where RIGHT says so; "dspark" leaves it as it is."""
    if kind == "dspark":
        return
    known = [torch.cat([setup.reference.prompts[row], setup.reference.tokens[row]]) for row in rows]
    script = torch.nn.utils.rnn.pad_sequence(known, batch_first=True)

    def draw(self, anchors, lengths, block_table, counts, width):
        row, at = torch.arange(len(lengths))[:, None], lengths[:, None] + 1 + torch.arange(width)
        tokens = script[row, at.clamp(max=script.shape[1] - 1)]
        return torch.where(RIGHT[kind](row, at), tokens, (tokens + 1) % VOCAB), None, None

    monkeypatch.setattr(DSparkProposer, "draw", draw)


@pytest.mark.parametrize("kind", ["dspark", *RIGHT])
@pytest.mark.parametrize("width", WIDTHS)
def test_greedy_tokens_are_those_without_drafts(setup, launched, monkeypatch, width: int, kind: str) -> None:
    count = 14
    for rows in ([1], [0, 1, 2]):
        draw_from_script(monkeypatch, setup, rows, kind)
        before = setup.rounds
        launched.clear()
        found = setup.generate(rows, max_new_tokens=count, num_assistant_tokens=width)
        assert torch.equal(found[:, -count:], setup.reference.tokens[rows, :count])
        rounds = setup.rounds - before
        assert rounds <= len(launched) <= rounds + 1 and all(map(any, launched))
        if kind != "dspark":
            assert rounds == {"oracle": -(-(count - 1) // (width + 1)), "adversary": count - 1}.get(kind, rounds)


@pytest.mark.parametrize("kind", ["dspark", "oracle"])
def test_the_last_token_may_come_anywhere_in_a_block(setup, launched, monkeypatch, kind: str) -> None:
    rows = [0, 1, 2]
    draw_from_script(monkeypatch, setup, rows, kind)
    for count in (1, 2, 3, 5, 6, 7):
        launched.clear()
        found = setup.generate(rows, max_new_tokens=count, num_assistant_tokens=4)
        assert torch.equal(found[:, -count:], setup.reference.tokens[:, :count])
        assert len(launched) >= (count > 1) and (count > 2 or len(launched) < 2)


class SeenToken(StoppingCriteria):
    """Stops a row once it has one of the tokens after its prompt."""

    def __init__(self, tokens: list[int], columns: int) -> None:
        self._tokens, self._columns = torch.tensor(tokens), columns

    def __call__(self, input_ids, scores, **unused):
        return torch.isin(input_ids[:, self._columns :], self._tokens).any(dim=1)


@pytest.mark.parametrize("kind", ["oracle", "sometimes", "adversary"])
@pytest.mark.parametrize("end", ["eos", "criterion", "eos and criterion", "stop string"])
def test_rows_end_where_they_end_without_drafts(setup, launched, monkeypatch, tokenizer, end: str, kind: str) -> None:
    """Three ragged rows, ended at different places inside of blocks; the streamer sees the same columns."""
    rows = [0, 1, 2]
    draw_from_script(monkeypatch, setup, rows, kind)
    tokens = setup.reference.tokens
    early, late = [int(tokens[0, 2]), int(tokens[1, 6])], [int(tokens[2, 9])]
    columns = max(LENGTHS)
    criteria = lambda ends: {"stopping_criteria": StoppingCriteriaList([SeenToken(ends, columns)])}  # noqa: E731
    ends = {
        "eos": {"eos_token_id": early + late},
        "criterion": criteria(early + late),
        "eos and criterion": {"eos_token_id": early, **criteria(late)},
        "stop string": {"stop_strings": tokenizer.decode(tokens[2, 8:10])[-2:], "tokenizer": tokenizer},
    }[end]
    seen = Recorder(), Recorder()
    options = {"max_new_tokens": 16, **ends}
    wanted = setup.expected(rows, streamer=seen[0], **options)
    found = setup.generate(rows, streamer=seen[1], num_assistant_tokens=4, **options)
    assert found.tolist() == wanted.tolist() and len(launched) > 1
    assert seen[0].values == seen[1].values and seen[1].ends == 1


def test_sequences_of_one_prompt(setup, launched) -> None:
    """Sampling from the one likeliest token is greedy decoding."""
    found = setup.generate([2], max_new_tokens=12, do_sample=True, top_k=1, num_return_sequences=3)
    assert torch.equal(found[:, -12:], setup.reference.tokens[[2, 2, 2], :12]) and launched


def test_scores_and_logits_are_those_of_every_column(setup, launched, monkeypatch) -> None:
    rows = [0, 1, 2]
    draw_from_script(monkeypatch, setup, rows, "sometimes")
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": 10}
    warped = {"do_sample": True, "top_k": 1, "temperature": 0.5}
    found, wanted = setup.generate(rows, **asked, **warped), setup.expected(rows, **asked, **warped)
    assert torch.equal(found.sequences, wanted.sequences) and launched
    for name in ("scores", "logits"):
        mine, theirs = (torch.stack(output[name]) for output in (found, wanted))
        assert torch.equal(mine.isinf(), theirs.isinf())
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-3)


def test_sampled_tokens_follow_the_targets_distribution(launched) -> None:
    """By the default rule; by both on two ranks in tests/distributed/test_drafting.py."""
    warpers = {"temperature": 0.9, "top_k": 6}
    found = check_sampling(5, 300, "standard", warpers, dcp_size=1, num_speculative_tokens=3)
    assert found["p"] > 1e-3 and launched


def test_a_round_that_a_rank_did_not_answer_in_is_not_published(setup, monkeypatch) -> None:
    """A lost rank shows while two rounds are under way: the tokens of neither reach the streamer, and the pages return."""
    lost: list[bool] = []
    verify = Session.verify_ahead

    def check(group) -> None:
        if len(lost) == 2:
            raise RankError("rank 1 did not answer")

    def counted(self, *arguments):
        logits = verify(self, *arguments)
        lost.append(True)
        return logits

    monkeypatch.setattr("dcp_compile.runtime.session.check_answering", check)
    monkeypatch.setattr(Session, "verify_ahead", counted)
    streamer, free = Recorder(), setup.optimised._dcp_engine.pages.available
    with pytest.raises(RankError):
        setup.generate([0], max_new_tokens=12, streamer=streamer)
    assert len(lost) == 2 and len(streamer.values) == 2  # the prompt, and the token of the prefill
    assert setup.optimised._dcp_engine.pages.available == free


def test_a_session_that_went_ahead_takes_no_steps_of_the_host(setup) -> None:
    with setup.optimised._dcp_engine.open(1, 20) as session:
        session.prefill([torch.arange(4, 9)])
        requests = session.go_ahead()
        assert (requests.lengths.tolist(), requests.accepted.tolist()) == ([5], [0])
        for step in (lambda: session.decode(torch.tensor([4]), [True]), lambda: session.verify(torch.tensor([[4]]), [1])):
            with pytest.raises(ValueError, match="gone ahead"):
                step()
        session.verify_ahead(torch.tensor([[4, 5, 6]]), torch.tensor([3]), requests)
        requests = session.commit_ahead(torch.tensor([2]), requests)
        assert (requests.lengths.tolist(), requests.accepted.tolist(), session.lengths) == ([7], [2], [5])
        session.catch_up([2])
        assert session.lengths == [7]


def test_what_makes_rounds_wait(setup, launched) -> None:
    engine, draft = setup.optimised._dcp_engine, setup.optimised._dcp.draft
    call = SimpleNamespace(input_ids=torch.zeros(1, 1), ragged=True)
    assert why_wait(engine, draft) is why_wait(engine, draft, call) is None
    reasons = [
        why_wait(dataclasses.replace(engine, verify_costs=object()), draft),
        why_wait(dataclasses.replace(engine, reads_lengths=True), draft),
        why_wait(engine, dataclasses.replace(draft, reads_lengths=True)),
        why_wait(engine, draft, SimpleNamespace(input_ids=torch.zeros(1, 1, device="meta"), ragged=True)),
        why_wait(engine, draft, SimpleNamespace(input_ids=torch.zeros(1, 1), ragged=False)),
    ]
    assert None not in reasons and len(set(reasons)) == 5
    assert "the host reads tokens one round late" in dcp_compile.explain(setup.optimised)

    processors = {"logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)]), "max_new_tokens": 8}
    assert torch.equal(setup.generate([0, 1], **processors), setup.expected([0, 1], **processors)) and not launched


@pytest.mark.parametrize("ends", [False, True])
def test_scores_and_logits_are_those_of_the_waiting_loop(setup, launched, monkeypatch, ends: bool) -> None:
    """Zeros for a row that has ended included."""
    rows, tokens = [0, 1, 2], setup.reference.tokens
    draw_from_script(monkeypatch, setup, rows, "oracle")
    options = {
        "return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": 10,
        "do_sample": True, "top_k": 1, "temperature": 0.5, "num_assistant_tokens": 4,
        "eos_token_id": [int(tokens[0, 1]), int(tokens[1, 5])] if ends else None,
    }  # fmt: skip
    found = setup.generate(rows, **options)
    assert launched
    launched.clear()
    monkeypatch.setattr("dcp_compile.generation.patch.why_wait", lambda *given: "to compare")
    wanted = setup.generate(rows, **options)
    assert torch.equal(found.sequences, wanted.sequences) and not launched
    for name in ("scores", "logits"):
        mine, theirs = (torch.stack(output[name]) for output in (found, wanted))
        assert torch.equal(mine.isinf(), theirs.isinf()) and ends == bool((mine[-1] == 0).all(dim=1).any())
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-3)


SAMPLING = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(9), TopPLogitsWarper(0.9)])


@pytest.mark.parametrize("acceptance", [None, "standard", "block"])
@pytest.mark.parametrize("window", [None, 5])
def test_a_round_needs_no_value_on_the_host(setup, acceptance: str | None, window: int | None) -> None:
    """All of it runs on tensors without values, which can be neither read nor mixed with tensors of the host."""
    device, rows, width, vocab = torch.device("meta"), 2, 4, setup.optimised._dcp_engine.vocab_size
    real = setup.optimised._dcp.draft
    taps = real.model.context_proj.in_features

    def program(states: int) -> Callable[[dict[str, Tensor]], tuple[Tensor, ...]]:
        def run(inputs):
            assert {tensor.device for tensor in inputs.values()} == {device}
            count = inputs["positions"].numel()
            assert inputs["input_ids"].shape == inputs["row_positions"].shape == inputs["logit_rows"].shape == (count,)
            return torch.empty(count, vocab, device=device), torch.empty(count, states, device=device)

        return run

    draft = dataclasses.replace(
        real, model=copy.deepcopy(real.model).to(device), caches=[cache.to(device) for cache in real.caches],
        block=program(real.model.config.hidden_size), window=window,
    )  # fmt: skip
    call = SimpleNamespace(
        processors=SAMPLING if acceptance else LogitsProcessorList(), do_sample=acceptance is not None, max_length=20,
        pads=[0, 3],
    )  # fmt: skip
    with setup.optimised._dcp_engine.open(rows, 20) as session:
        session.engine = dataclasses.replace(session.engine, device=device, verify=program(taps))
        session.lengths = [9, 6]
        proposer = DSparkProposer(draft)
        proposer.begin(session, [], Sampling(call.do_sample, call.processors))
        rounds = Rounds(session, call, proposer, width, acceptance or "standard", torch.zeros(rows, dtype=torch.int64))
        for _ in range(2):
            verdict, scores, logits = rounds.run(torch.ones(rows, dtype=torch.bool, device=device))
            assert verdict.shape == (rows, width + 2) and verdict.device == device
            assert scores.shape == logits.shape == (rows, width + 1, vocab)


class NothingRead(TorchDispatchMode):
    """An error where a value decides what the host does next. What our own operators do inside is theirs."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim"), func
        if name in ("index", "index_put", "index_put_"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9}])
def test_a_round_reads_nothing_back(setup, monkeypatch, sampling: dict[str, Any]) -> None:
    """With the compiled steps as they are."""
    launch = Rounds.launch
    rounds = []

    def watched(self, wanted):
        with NothingRead():
            rounds.append(launch(self, wanted))
        return rounds[-1]

    monkeypatch.setattr(Rounds, "launch", watched)
    setup.generate([0, 1, 2], max_new_tokens=8, **sampling)
    assert len(rounds) > 1
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NothingRead():
        int(rounds[0].verdict[0, 0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, where copies and kernels run on their own")
@pytest.mark.parametrize("cuda_graphs", ["auto", False])
def test_launching_rounds_does_not_wait_for_the_device(monkeypatch, cuda_graphs) -> None:
    """Every launch under an error for whatever waits, after a call that has compiled all there is to compile."""
    plain = calm_kimi_k3(3, seed=1)
    plain.generation_config.eos_token_id = None
    reference = decode_by_transformers(plain, [9, 9, 9], 20, seed=fresh_seeds("ahead on a GPU", 1)[0])
    draft = draft_for(plain, (0, 1), 1).cuda()
    settings = {"block_size": 16, "max_batch_size": 3, "max_seq_len": 128, "num_speculative_tokens": 4}
    config = dcp_compile.DCPConfig(cuda_graphs=cuda_graphs, lowering="eager", **settings)
    model = dcp_compile.optimize(copy.deepcopy(plain).cuda(), config=config, draft=draft)
    ids = torch.stack(reference.prompts).cuda()
    options = {"max_new_tokens": 20, "pad_token_id": 0}
    warped = {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9}
    launch, rounds = Rounds.launch, []

    def strict(self, wanted):
        torch.cuda.set_sync_debug_mode("error")
        try:
            rounds.append(launch(self, wanted))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return rounds[-1]

    calls = [{"do_sample": False}, warped, {**warped, "acceptance": "block"}]
    for call in calls:
        model.generate(ids, assistant_model=draft, **options, **call)
    monkeypatch.setattr(Rounds, "launch", strict)
    for call in calls:
        rounds.clear()
        found = model.generate(ids, assistant_model=draft, **options, **call)
        assert len(rounds) > 2 and found.shape == (3, 29)
        if not call["do_sample"]:
            assert torch.equal(found[:, 9:].cpu(), reference.tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("confident", [True, False])
def test_adaptive_rounds_wait_and_replay_the_graph_of_what_they_verify(monkeypatch, confident: bool) -> None:
    """By seconds of a step's rows: drafts for nothing, three of them, each at a whole step; and by those on this GPU."""
    priced = [({3: 1.0, 15: 1.0}, {5}), ({3: 1.0, 6: 1.0, 15: 10.0}, {2, 4}), ({3: 1.0, 15: 13.0}, {1})]
    plain = MODELS["kimi_k3"](layers=3, seed=1)
    reference = decode_by_transformers(plain, LENGTHS, 20, seed=fresh_seeds("adaptive on a GPU", 1)[0])
    draft = draft_for(plain, (0, 1), 1, enable_confidence_head=confident).cuda()
    settings = {"block_size": 16, "max_batch_size": 3, "max_seq_len": 128, "num_speculative_tokens": 4}
    config = dcp_compile.DCPConfig(verify="adaptive", lowering="eager", **settings)
    model = dcp_compile.optimize(copy.deepcopy(plain).cuda(), config=config, draft=draft)
    setup, engine = Setup(plain, model, draft, reference), model._dcp_engine
    assert why_wait(engine, model._dcp.draft) and model._dcp.draft.gives_confidence == confident
    inputs = {name: tensor.cuda() for name, tensor in setup.inputs([0, 1, 2]).items()}
    widths = {engine.verify.bucket(3, rows).graph: rows for rows in (1, 2, 4, 5)}
    replay, graphs = torch.cuda.CUDAGraph.replay, []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: graphs.append(graph) or replay(graph))
    for costs, first in [(engine.verify_costs.table[3], {1, 2, 4, 5}), *priced]:
        monkeypatch.setattr(engine, "verify_costs", StepCosts({3: costs}))
        graphs, before = [], setup.rounds
        found = setup.generate([0, 1, 2], max_new_tokens=20, **inputs)
        assert torch.equal(found[:, -20:].cpu(), reference.tokens)
        used = [widths[graph] for graph in graphs if graph in widths]
        assert used[0] in first and len(used) == setup.rounds - before and (first != {1} or set(used) == first)
