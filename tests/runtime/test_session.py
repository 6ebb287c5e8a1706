# SPDX-License-Identifier: Apache-2.0
"""Sessions own pages and slots, refuse what does not fit before anything changes, and never see what others left."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch

from dcp_compile.cache import PagePool, SlotPool
from dcp_compile.errors import CapacityError
from dcp_compile.parallel import ParallelLayout
from dcp_compile.runtime import Engine
from tests.runtime.reference import (
    BLOCK,
    TOLERANCE,
    Reference,
    captured,
    decode_by_transformers,
    decode_greedily,
    outcome,
)
from tests.runtime.speculation import decode_in_rounds

NAME = "kimi_k3"  # attention and recurrent layers


@functools.cache
def reference() -> Reference:
    return decode_by_transformers(captured(NAME).model, [1, 8, 13, 40], steps=6, seed=3)


@functools.cache
def shared_engine() -> Engine:
    return captured(NAME).engine(num_speculative_tokens=2, max_seq_len=64)


@pytest.fixture
def engine():
    """The same programs and memory for every test, with pools of its own that must be full again after it."""
    shared = shared_engine()
    pages, slots = PagePool(1 + shared.pages.total), SlotPool(shared.slots.total)
    yield dataclasses.replace(shared, pages=pages, slots=slots)
    assert (pages.available, slots.available) == (pages.total, slots.total)


def poison(engine: Engine) -> None:
    """Fill every cache and state with NaN, as memory that was never written may be."""
    for state in engine.states.values():
        state.fill_(float("nan"))


@pytest.mark.parametrize("batch, length, message", [
    (0, 8, "a batch of 0 does not fit: max_batch_size is 4"),
    (5, 8, "a batch of 5 does not fit: max_batch_size is 4.*larger max_batch_size"),
    (1, 65, "65 tokens .* do not fit: max_seq_len is 64.*larger max_seq_len"),
    (1, 0, "max_length=0 must be at least 1"),
])  # fmt: skip
def test_limits_of_open(engine: Engine, batch: int, length: int, message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        engine.open(batch, length)


def test_pools_in_use(engine: Engine) -> None:
    with engine.open(3, 64):
        free = engine.pages.available
        with pytest.raises(CapacityError, match="2 state slots are needed but 1 of 4 are free"):
            engine.open(2, 8)
        assert (engine.pages.available, engine.slots.available) == (free, 1)
        with engine.open(1, 64):
            assert engine.slots.available == 0


def test_every_configured_request_fits_at_full_length(engine: Engine) -> None:
    with engine.open(4, 64):
        assert engine.pages.available == 0


def test_pages_and_slots_come_back_after_an_error(engine: Engine) -> None:
    with pytest.raises(KeyError):
        with engine.open(2, 30) as session:
            session.prefill(reference().prompts[:2])
            raise KeyError
    session.close()  # once more does nothing


def test_pages_and_slots_come_back_if_opening_is_interrupted(engine: Engine, monkeypatch) -> None:
    """The fixture looks at the pools."""

    def interrupt(slots: list[int]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_reset", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.open(2, 8)


def test_a_closed_session_is_of_no_use(engine: Engine) -> None:
    with engine.open(1, 8) as session:
        pass
    for step in (
        lambda: session.prefill([torch.tensor([3])]),
        lambda: session.decode(torch.tensor([3]), [True]),
        lambda: session.verify(torch.tensor([[3]]), [1]),
    ):
        with pytest.raises(ValueError, match="the session is closed; open another one"):
            step()


def test_refused_steps_change_nothing(engine: Engine) -> None:
    """Each refusal leaves lengths, caches and states as they were: decoding goes on as if it had not been tried."""
    expected = reference().rows([1, 2])
    prompts, tokens = expected.prompts, expected.tokens
    with engine.open(2, expected.longest) as session:
        over = torch.full((expected.longest + 3,), 3)
        refused_before_prefill = [
            (CapacityError, "request 1 would hold 22 tokens, 21 are reserved", lambda: session.prefill([prompts[0], over])),
            (ValueError, "one number .* for each of 2 requests", lambda: session.prefill(prompts[:1])),
            (ValueError, "at least one token per request", lambda: session.prefill([prompts[0], prompts[1][:0]])),
            (ValueError, "nothing to commit", lambda: session.commit([0, 0])),
        ]
        refused_after_it = [
            (ValueError, "starts a session", lambda: session.prefill([tokens[0, :1], tokens[1, :1]])),
            (ValueError, "for each of 2 requests", lambda: session.decode(tokens[:, 0], [True])),
            (ValueError, "4 rows per request do not fit a verify step of at most 3",
             lambda: session.verify(tokens[:, :4], [1, 1])),
            (ValueError, "3 tokens of a request cannot be taken from 2 columns",
             lambda: session.verify(tokens[:, :2], [3, 1])),
            (ValueError, "at least 0 for each", lambda: session.verify(tokens[:, :2], [-1, 1])),
            (ValueError, "nothing to commit", lambda: session.commit([0, 0])),
        ]  # fmt: skip
        refused_while_verifying = [
            (ValueError, "was not committed", lambda: session.verify(tokens[:, :2], [1, 1])),
            (ValueError, "was not committed", lambda: session.decode(tokens[:, 0], [True, True])),
            (ValueError, "request 1: cannot keep 3 of 2", lambda: session.commit([0, 3])),
            (ValueError, "request 0: cannot keep -1 of 3", lambda: session.commit([-1, 0])),
            (ValueError, "1 counts given for 2 requests", lambda: session.commit([1])),
        ]

        def try_all(refused) -> None:
            before = list(session.lengths)
            for error, message, step in refused:
                with pytest.raises(error, match=message):
                    step()
            assert session.lengths == before

        try_all(refused_before_prefill)
        found = [session.prefill(prompts)]
        try_all(refused_after_it)
        found += session.verify(tokens[:, :3], [3, 2]).unbind(1)[:2]
        try_all(refused_while_verifying)
        session.commit([2, 2])
        found.append(session.decode(tokens[:, 2], [True, True]))
        wanted = expected.logits[:, :4].unbind(1)
        torch.testing.assert_close(torch.stack(found), torch.stack(wanted), rtol=0, atol=TOLERANCE)


def test_an_engine_without_speculation_verifies_nothing() -> None:
    engine = captured(NAME).engine(max_batch_size=1, max_seq_len=16)
    assert engine.max_query_rows == 1
    with engine.open(1, 16) as session:
        session.prefill([torch.tensor([3])])
        with pytest.raises(ValueError, match="larger num_speculative_tokens"):
            session.verify(torch.tensor([[3]]), [1])


def test_memory_that_was_never_written_is_never_read(engine: Engine) -> None:
    """Everything is NaN before: caches, states, pending rows. Page 0 and pages of nobody are NaN afterwards as well."""
    poison(engine)
    assert decode_greedily(engine, reference()).good
    for ref, state in engine.states.items():
        if ref.kind == "kv_cache":
            rows = (~state.isnan().any(dim=-1)).sum(dim=1)
            assert rows[0] == 0
            assert int(rows.sum()) == sum(len(prompt) + reference().steps - 1 for prompt in reference().prompts)


def test_padded_rows_stand_at_position_zero(engine: Engine, fresh_seed: int) -> None:
    """A model may look positions up in a table: whatever a row is, its number lies in what requests may hold."""
    seen = []

    def watched(program):
        def run(inputs):
            seen.append((inputs["positions"].flatten(), inputs["row_positions"]))
            return program(inputs)

        return run

    engine.step, engine.verify = watched(engine.step), watched(engine.verify)
    assert decode_in_rounds(engine, reference(), fresh_seed).good
    positions, of_rows = (torch.cat(parts) for parts in zip(*seen))
    assert (positions < 0).any() and torch.equal(of_rows, positions.clamp_min(0))
    assert of_rows.max() < engine.config.max_seq_len + engine.config.num_speculative_tokens


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_out_tokens_and_nothing_else(engine: Engine, ranks: int) -> None:
    """A column of the block table holds the tokens of all ranks; a recurrent state is one sequence's on every rank."""
    group = SimpleNamespace(group_name="ranks")
    shared = captured(NAME).engine(
        ParallelLayout(dcp_size=ranks, dcp_group=group), num_speculative_tokens=2, max_seq_len=64
    )
    assert engine.columns == -(-(64 + 2) // BLOCK) and shared.columns == -(-(64 + 2) // (BLOCK * ranks))
    assert shared.pages.total == 4 * shared.columns and shared.slots.total == engine.slots.total == 4
    for ref, tensor in shared.states.items():
        alone = engine.states[ref]
        pages = (1 + shared.pages.total,) if ref.kind == "kv_cache" else alone.shape[:1]
        assert tensor.shape == (*pages, *alone.shape[1:]), ref


def test_pages_and_slots_are_reused_with_what_others_left_in_them(engine: Engine) -> None:
    everything = reference()
    assert decode_greedily(engine, everything).good
    for rows in ([3], [0, 1], [2, 0, 3]):
        assert decode_greedily(engine, everything.rows(rows)).good


def test_pending_rows_of_a_closed_session_are_not_committed_by_the_next(engine: Engine) -> None:
    expected = reference()
    with engine.open(4, expected.longest) as session:
        session.prefill(expected.prompts)
        session.verify(expected.tokens[:, :3], [3] * 4)
        session.commit([3, 2, 1, 0])
    with engine.open(4, expected.longest) as session:
        logits = [session.prefill(expected.prompts)]
        logits += session.verify(expected.tokens[:, :3], [3] * 4).unbind(1)
        wanted = expected.logits[:, :4].unbind(1)
        torch.testing.assert_close(torch.stack(logits), torch.stack(wanted), rtol=0, atol=TOLERANCE)


def test_two_sessions_at_once(engine: Engine) -> None:
    """They take turns; one closes early, a third takes over its pages while the other goes on."""
    first, second, third = reference().rows([2, 0]), reference().rows([3]), reference().rows([1])

    def step(session, expected: Reference, logits: list, tokens: list) -> None:
        batch = len(expected.prompts)
        logits.append(session.decode(tokens[-1], [True] * batch) if tokens else session.prefill(expected.prompts))
        tokens.append(logits[-1].argmax(dim=-1))

    found = {name: ([], []) for name in ("first", "second", "third")}
    with engine.open(1, second.longest) as two:
        with engine.open(2, first.longest) as one:
            for _ in range(3):
                step(one, first, *found["first"])
                step(two, second, *found["second"])
        with engine.open(1, third.longest) as three:
            for _ in range(3):
                step(three, third, *found["third"])
                step(two, second, *found["second"])
    for (logits, tokens), expected in zip(found.values(), (first, second, third)):
        count = len(tokens)
        part = Reference(expected.prompts, expected.tokens[:, :count], expected.logits[:, :count])
        assert outcome(torch.stack(tokens, dim=1), torch.stack(logits, dim=1), part).good


def test_a_finished_row_stays_as_it_is(engine: Engine) -> None:
    """Rows drop out one by one; no write and no other row is affected by what is passed for them."""
    expected = reference()
    with engine.open(4, expected.longest) as session:
        session.prefill(expected.prompts)
        caches = [state for ref, state in engine.states.items() if ref.kind == "kv_cache"]
        for step in range(4):
            active = [row >= step for row in range(4)]
            untouched = [cache[session.block_table[:step].flatten().long()].clone() for cache in caches]
            tokens = torch.where(torch.tensor(active), expected.tokens[:, step], -7)
            logits = session.decode(tokens, active)
            torch.testing.assert_close(logits[step:], expected.logits[step:, step + 1], rtol=0, atol=TOLERANCE)
            assert logits[:step].eq(0).all()
            for cache, before in zip(caches, untouched):
                after = cache[session.block_table[:step].flatten().long()]
                torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
        assert session.lengths == [len(prompt) + row + 1 for row, prompt in enumerate(expected.prompts)]


@pytest.mark.parametrize("chunk", [1, 3, BLOCK, 39, 40, 41])
def test_chunks_of_prefill(engine: Engine, chunk: int) -> None:
    """Prompts end in the same chunk whatever its size; the shorter ones are not in the first ones."""
    engine.config = engine.config.replace(prefill_chunk=chunk)
    assert decode_greedily(engine, reference()).good


@pytest.mark.parametrize("active", [[1, 0, 1, 0], torch.tensor([True, False, True, False]), (True, None, True, False)])
def test_flags_of_rows_may_be_of_any_kind(engine: Engine, active) -> None:
    expected = reference()
    with engine.open(4, expected.longest) as session:
        session.prefill(expected.prompts)
        logits = session.decode(expected.tokens[:, 0], active)
        torch.testing.assert_close(logits[[0, 2]], expected.logits[[0, 2], 1], rtol=0, atol=TOLERANCE)
        assert logits[[1, 3]].eq(0).all()
