# SPDX-License-Identifier: Apache-2.0
"""Random rounds of verify, commit and decode along a known continuation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from dcp_compile.lower import StepProgram
from dcp_compile.runtime import Engine, Session
from tests.runtime.reference import Outcome, Reference, largest
from tests.tiny_models import VOCAB


def decode_in_rounds(engine: Engine, reference: Reference, seed: int) -> Outcome:
    """Walk along the reference's tokens by random steps until every row has had all of them.

    A verify step feeds each row 0 to K+1 tokens, of which a random number are the right ones, and keeps a random number
    of those: rejected suffixes, rows left out and rows that keep nothing all occur. Between them come single-token steps
    with some rows inactive. Logits are compared wherever all tokens before them are right; the tokens of the outcome are
    those the engine would have chosen there.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(0, most + 1, (), generator=generator))

    batch, steps = reference.tokens.shape
    found = torch.full_like(reference.logits, float("nan"))
    with engine.open(batch, reference.longest) as session:
        found[:, 0] = session.prefill(reference.prompts)
        done = [0] * batch
        while min(done) < steps - 1:
            room = [steps - 1 - count for count in done]
            if draw(3) == 0:
                step = [min(draw(1), left) for left in room]
                tokens = torch.stack([reference.tokens[row, done[row]] for row in range(batch)])
                logits = session.decode(tokens, [bool(count) for count in step])[:, None]
                right = kept = step
            else:
                fed = [min(draw(engine.max_query_rows), left) for left in room]
                right = [draw(count) for count in fed]
                kept = [draw(count) for count in right]
                logits = session.verify(_window(reference, done, fed, right, generator), fed)
                session.commit(kept)
            for row in range(batch):
                first = done[row] + 1
                found[row, first : first + right[row]] = logits[row, : right[row]]
            done = [count + keep for count, keep in zip(done, kept)]
            _check_lengths(session, reference, done)
    tokens = found.argmax(dim=-1)
    return Outcome(int((tokens != reference.tokens).sum()), largest(found - reference.logits))


def _window(
    reference: Reference, done: list[int], fed: list[int], right: list[int], generator: torch.Generator
) -> Tensor:
    """Tokens of a verify step: the next right ones of each row, then wrong ones, then what must be ignored."""
    width = max([1, *fed])
    window = torch.randint(3, VOCAB, (len(fed), width), generator=generator)
    for row, count in enumerate(right):
        window[row, :count] = reference.tokens[row, done[row] : done[row] + count]
        if count < fed[row]:
            window[row, count] = (reference.tokens[row, done[row] + count] + 1) % VOCAB
        window[row, fed[row] :] = -1
    return window


def _check_lengths(session: Session, reference: Reference, done: list[int]) -> None:
    assert session.lengths == [len(prompt) + count for prompt, count in zip(reference.prompts, done)]


def with_stale_prefixes(engine: Engine, seed: int) -> Engine:
    """The engine with random shorter prefixes in place of the committed lengths, as if they were planned long ago."""
    generator = torch.Generator().manual_seed(seed)

    def stale(program: StepProgram) -> StepProgram:
        def run(inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
            lengths = inputs["prefix_lengths"]
            shares = torch.rand(lengths.shape, generator=generator)
            return program({**inputs, "prefix_lengths": ((lengths + 1) * shares).long()})

        return run

    return dataclasses.replace(engine, step=stale(engine.step), verify=engine.verify and stale(engine.verify))
