# SPDX-License-Identifier: Apache-2.0
"""Verify steps with ragged counts and rejected suffixes equal decoding one token at a time."""

from __future__ import annotations

import functools

import pytest
import torch

from dcp_compile.capture import capture
from dcp_compile.errors import CapacityError
from dcp_compile.runtime import Engine
from tests.runtime.reference import TOLERANCE, Captured, Reference, captured, decode_by_transformers, decode_greedily
from tests.runtime.speculation import decode_in_rounds, with_stale_prefixes
from tests.tiny_models import tiny_kimi_k3, tiny_kimi_linear

LAYOUTS = ["split", "flattened"]
RECURRENT = ["kimi_k3", "kimi_linear"]


@functools.cache
def reference(name: str) -> Reference:
    """Prompts shorter than a convolution window, ending before, at and after page borders, and longer ones."""
    return decode_by_transformers(captured(name).model, [1, 2, 7, 8, 9, 30], steps=20, seed=7)


@functools.cache
def engine_of(name: str, layout: str = "split") -> Engine:
    return captured(name).engine(num_speculative_tokens=4, decode_layout=layout, max_batch_size=6, prefill_chunk=16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*RECURRENT, "deepseek_v3"])
def test_rounds_of_verify_and_decode(name: str, layout: str, fresh_seed: int) -> None:
    expected = reference(name)
    engine = engine_of(name, layout)
    for seed in (fresh_seed, fresh_seed + 1):
        assert decode_in_rounds(engine, expected, seed).good


@pytest.mark.parametrize("name", RECURRENT)
def test_a_verify_step_commits_nothing(name: str) -> None:
    """Two verify steps in a row, the first keeping nothing, see the same tokens before them."""
    expected = reference(name)
    engine = engine_of(name)
    batch = len(expected.prompts)
    with engine.open(batch, expected.longest) as session:
        session.prefill(expected.prompts)
        session.verify(torch.full((batch, 4), 5), [4, 3, 2, 1, 0, 4])
        session.commit([0] * batch)
        logits = session.verify(expected.tokens[:, :4], [4] * batch)
        torch.testing.assert_close(logits, expected.logits[:, 1:5], rtol=0, atol=TOLERANCE)
        session.commit([4, 1, 0, 2, 3, 4])
        logits = session.decode(expected.tokens[range(batch), session_offsets(session, expected)], [True] * batch)
        wanted = expected.logits[range(batch), [5, 2, 1, 3, 4, 5]]
        torch.testing.assert_close(logits, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", RECURRENT)
def test_committing_is_running_the_kept_tokens_one_by_one(name: str) -> None:
    """Recurrent states and convolution windows of every layer, for every number of kept tokens of a whole draft."""
    # In float64: the layers below a state round a step of five rows and one of a single row differently.
    model = {"kimi_k3": tiny_kimi_k3, "kimi_linear": tiny_kimi_linear}[name](3, dtype=torch.float64)
    engine = Captured(model, capture(model)).engine(num_speculative_tokens=4)
    prompt, following = [torch.arange(5, 14)], torch.tensor([[40, 3, 77, 12, 9]])
    kinds = ("state", "conv_state")

    def states(session) -> list[torch.Tensor]:
        slot = session._slots[0]
        return [tensor[slot].clone() for ref, tensor in engine.states.items() if ref.kind in kinds]

    with engine.open(1, 40) as single:
        single.prefill(prompt)
        one_by_one = [states(single)]
        for column in following.T:
            single.decode(column, [True])
            one_by_one.append(states(single))
    for kept in range(6):  # none, ..., the anchor and all of K = 4 drafts
        with engine.open(1, 40) as session:
            session.prefill(prompt)
            session.verify(following, [5])
            assert all(map(torch.equal, states(session), one_by_one[0]))
            session.commit([kept])
            session.verify(torch.tensor([[7]]), [1])  # the next step is what carries a commit out
            for found, wanted in zip(states(session), one_by_one[kept], strict=True):
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert any((one - other).abs().max() > 1e-2 for one, other in zip(one_by_one[0], one_by_one[1]))


def session_offsets(session, expected: Reference) -> list[int]:
    return [length - len(prompt) for length, prompt in zip(session.lengths, expected.prompts)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", RECURRENT)
def test_a_row_left_out_keeps_its_place(name: str, layout: str) -> None:
    """A row that takes no part for several steps, after a verify step whose tokens it has yet to commit."""
    expected = reference(name).rows([2, 4])
    engine = engine_of(name, layout)
    with engine.open(2, expected.longest) as session:
        session.prefill(expected.prompts)
        session.verify(expected.tokens[:, :3], [3, 3])
        session.commit([2, 3])
        for step in range(3, 6):
            logits = session.decode(torch.stack([torch.tensor(-1), expected.tokens[1, step]]), [False, True])
            torch.testing.assert_close(logits[1], expected.logits[1, step + 1], rtol=0, atol=TOLERANCE)
            assert logits[0].eq(0).all()
        logits = session.decode(torch.stack([expected.tokens[0, 2], expected.tokens[1, 6]]), [True, True])
        torch.testing.assert_close(logits, expected.logits[[0, 1], [3, 7]], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["kimi_k3", "deepseek_v3"])
def test_any_older_prefix_gives_the_same(name: str, fresh_seed: int) -> None:
    """The split layout may take any number of final tokens for its prefix, a different one in every step."""
    expected = reference(name)
    stale = with_stale_prefixes(engine_of(name), fresh_seed)
    assert decode_greedily(stale, expected).good
    assert decode_in_rounds(stale, expected, fresh_seed).good


def test_one_verify_step_up_to_the_last_token_of_a_request() -> None:
    """The look-ahead past a request's last token has room of its own; one token more does not."""
    expected = reference("kimi_k3").rows([3])
    limit = len(expected.prompts[0]) + 1
    engine = captured("kimi_k3").engine(num_speculative_tokens=7, max_seq_len=limit)
    with engine.open(1, limit) as session:
        session.prefill(expected.prompts)
        logits = session.verify(expected.tokens[:, :8], [8])
        torch.testing.assert_close(logits, expected.logits[:, 1:9], rtol=0, atol=TOLERANCE)
        session.commit([1])
        with pytest.raises(CapacityError, match=f"request 0 would hold {limit + 8} tokens, {limit + 7} are reserved"):
            session.verify(expected.tokens[:, 1:9], [8])
        assert session.lengths == [limit]
        logits = session.verify(expected.tokens[:, 1:8], [7])
        torch.testing.assert_close(logits, expected.logits[:, 2:9], rtol=0, atol=TOLERANCE)
