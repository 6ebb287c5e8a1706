# SPDX-License-Identifier: Apache-2.0
"""The two decoding loops that wait for every token: one per step, and draft-and-verify. A third is in ahead.py.

Both choose tokens from the same scores transformers would compute, and end each row where lock-step decoding ends it.
Every choice is the leader's: tokens, drafts and stops are broadcast before anything depends on them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from .acceptance import RULES, greedy
from .call import DecodeCall
from .columns import Columns
from .drafts import Proposal, Proposer
from .interface import Session
from .schedule import Schedule, WholeDrafts
from .validate import check_proposal


def decode_plain(session: Session, call: DecodeCall) -> GenerateDecoderOnlyOutput | Tensor:
    """One token per row and step. Finished rows are left out unless the caller asked for their scores."""
    columns = Columns(call, session)
    rows = range(len(call.prompts))
    active = [True for _ in rows]
    logits = session.prefill(call.prompts)
    while True:
        append_column(session, call, columns, logits, active)
        columns.publish()
        if columns.finished:
            return columns.result()
        active = [columns.takes_part(row) or call.scores or call.logits for row in rows]
        logits = session.decode(columns.last(), active)


def decode_speculative(
    session: Session,
    call: DecodeCall,
    proposer: Proposer,
    width: int,
    acceptance: str,
    schedule: Schedule = WholeDrafts(),
) -> GenerateDecoderOnlyOutput | Tensor:
    """Draft at most ``width`` tokens per row, verify as many of them as ``schedule`` wants in one step, keep what
    ``acceptance`` (of RULES) allows.

    Rows advance independently if all processors are context-free. Otherwise each step advances all rows by the tokens
    the slowest one keeps, so that processors see the same rectangular batches as without drafts. Scores of a row's
    columns after its end are zeros.
    """
    proposer.begin(session, call.prompts, call.sampling)
    columns = Columns(call, session)
    rows = range(len(call.prompts))
    ragged = call.ragged
    append_column(session, call, columns, session.prefill(call.prompts), [True for _ in rows])
    columns.publish()
    while not columns.finished:
        runs = [columns.runs(row) for row in rows]
        room = [min(width, columns.room(row) - 1) if runs[row] else 0 for row in rows]
        limits = schedule.before(room, runs)
        proposal = proposer.propose(columns.sequences(), limits)
        proposal = dataclasses.replace(proposal, tokens=session.fetch(proposal.tokens))
        check_proposal(proposal, limits, call.vocab_size)
        proposal = dataclasses.replace(proposal, counts=schedule.after(proposal, runs))
        drafts, counts = _agree_on_drafts(session, call, columns, proposal, width)
        window = torch.cat([columns.last()[:, None], drafts], dim=1)
        fed = [counts[row] + 1 if runs[row] else 0 for row in rows]
        logits = _take(session, session.verify(window, fed), call, fed)
        drafts = _sent(drafts, logits.device)
        if ragged:
            scores, judged = call.processors(None, logits.flatten(0, 1)).view(logits.shape), counts
        else:
            scores, judged = _scores_in_lockstep(session, call, columns, drafts, counts, runs, logits)
        tokens, emitted = _wait_for_verdict(session, call, scores, drafts, judged, proposal.probs, acceptance)
        schedule.learn(judged, [len(row) - 1 for row in emitted])
        kept = [columns.until_end(emitted[row]) if runs[row] else 0 for row in rows]
        if not ragged:
            lasting = [row for row in rows if runs[row] and emitted[row][kept[row] - 1] not in call.eos_tokens]
            slowest = min((kept[row] for row in lasting), default=max(kept))
            kept = [min(count, slowest) for count in kept]
        session.commit(kept)
        proposer.commit(kept)
        columns.extend(tokens, kept, scores, logits)
        columns.publish()
    return columns.result()


def append_column(
    session: Session, call: DecodeCall, columns: Columns, logits: Tensor, active: Sequence[bool]
) -> None:
    """Choose one token per row from ``logits [rows, vocab]``, with the calls and the draws transformers makes."""
    counts = [int(flag) for flag in active]
    logits = _take(session, logits[:, None], call, counts)[:, 0]
    scores = call.processors(columns.ids, logits) if call.processors else logits
    if call.do_sample:
        tokens = torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)
    else:
        tokens = scores.argmax(dim=-1)
    tokens = session.fetch(session.broadcast(tokens))
    columns.extend(tokens[:, None], counts, scores[:, None], logits[:, None])


def _take(session: Session, logits: Tensor, call: DecodeCall, counts: Sequence[int]) -> Tensor:
    """A copy of ``logits [rows, columns, vocab]`` where the caller works; columns past ``counts`` become zeros."""
    session.wait()  # processors may read tokens, and the caller may work on the CPU
    logits = logits.to(device=call.input_ids.device, dtype=torch.float32, copy=True)
    columns = logits.shape[1]
    if min(counts) < columns:
        unused = torch.arange(columns) >= torch.tensor(counts)[:, None]
        logits.masked_fill_(_sent(unused, logits.device)[..., None], 0.0)
    return logits


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on ``device``, without waiting for what the device is still doing."""
    return tensor.to(device, non_blocking=True)


def _agree_on_drafts(
    session: Session, call: DecodeCall, columns: Columns, proposal: Proposal, width: int
) -> tuple[Tensor, list[int]]:
    """The leader's drafts, cut after a token that ends the row: int64 ``[rows, most drafts]`` on the CPU, and how many."""
    packed = proposal.tokens.new_zeros(len(proposal.counts), width + 1)
    for row, count in enumerate(proposal.counts):
        count = columns.until_end(proposal.tokens[row, :count].tolist())
        packed[row, :count] = proposal.tokens[row, :count]
        packed[row, width] = count
    packed = session.broadcast(packed)
    counts = packed[:, width].tolist()
    return packed[:, : max(counts)], counts


def _scores_in_lockstep(
    session: Session,
    call: DecodeCall,
    columns: Columns,
    drafts: Tensor,
    counts: list[int],
    runs: list[bool],
    logits: Tensor,
) -> tuple[Tensor, list[int]]:
    """Scores of processors that need the whole batch at one length, column by column; all rows are equally long.

    Stops at the first column a row surely does not pass (its draft is impossible, or there is none), and where all rows
    end: later prefixes would be ones plain decoding never shows a processor. Returns scores
    ``[rows, columns done, vocab]`` and the drafts per row that can still be judged. A draft found impossible stays, so
    that the rule rejects it.
    """
    rows = range(len(counts))
    ends = [count > 0 and row[count - 1] in call.eos_tokens for row, count in zip(drafts.tolist(), counts)]
    following = torch.where(_first(drafts, counts), drafts, call.pad_token)
    ids = torch.cat([columns.ids, following], dim=1)
    done: list[Tensor] = []
    for offset in range(logits.shape[1]):
        done.append(call.processors(ids[:, : columns.width + offset].contiguous(), logits[:, offset].contiguous()))
        drafting = [runs[row] and offset < counts[row] for row in rows]
        impossible = torch.zeros(len(counts), dtype=torch.bool, device=ids.device)
        if any(drafting):
            draft = drafts[:, offset, None]
            if call.do_sample:
                impossible = done[-1].gather(1, draft).isneginf().squeeze(1)
            else:
                impossible = done[-1].argmax(dim=1) != draft.squeeze(1)
            impossible = impossible & torch.tensor(drafting, device=ids.device)
        rejected = session.fetch(session.broadcast(impossible.long())).tolist()
        final = [drafting[row] and ends[row] and offset == counts[row] - 1 for row in rows]
        exhausted = [runs[row] and offset == counts[row] and not ends[row] for row in rows]
        goes_on = any(drafting[row] and not final[row] for row in rows)
        if any(rejected) or any(exhausted) or not goes_on:
            break
    # A row's draft at the last column is judged unless another row ends the scan there. Were it judged only where it is
    # impossible itself, or only where it is not, whether it counts would depend on what it is, and outputs would be biased.
    ending = [row for row in rows if rejected[row] or exhausted[row]]
    judged = [min(counts[row], offset + all(other == row for other in ending)) for row in rows]
    return torch.stack(done, dim=1), judged


def _first(drafts: Tensor, counts: Sequence[int]) -> Tensor:
    return _sent(torch.arange(drafts.shape[1]) < torch.tensor(counts)[:, None], drafts.device)


def _wait_for_verdict(
    session: Session,
    call: DecodeCall,
    scores: Tensor,
    drafts: Tensor,
    counts: list[int],
    probs: Tensor | None,
    acceptance: str,
) -> tuple[Tensor, list[list[int]]]:
    """Tokens ``[rows, most drafts + 1]`` on the CPU, and those each row emits."""
    width = max(counts)
    if scores.shape[1] <= width:  # the last draft is impossible or ends its row: nothing follows it
        scores = torch.nn.functional.pad(scores, (0, 0, 0, 1))
    limits = _sent(torch.tensor(counts), drafts.device)
    verdict = judge(session, call, scores[:, : width + 1], drafts[:, :width], limits, probs, acceptance)
    verdict = session.fetch(verdict)
    return verdict[:, :-1], [row[: row[-1]] for row in verdict.tolist()]


def judge(
    session: Session,
    call: DecodeCall,
    scores: Tensor,
    drafts: Tensor,
    counts: Tensor,
    probs: Tensor | None,
    acceptance: str,
) -> Tensor:
    """The leader's verdict on ``drafts [rows, K]``, of which row's first ``counts[row]`` count.

    Args:
        scores: ``[rows, K + 1, vocab]``. counts: int64 ``[rows]``; all on one device.
        probs: what the drafts were drawn from, ``[rows, K or more, vocab]``, None if they were not.
        acceptance: the rule of RULES to sample by.

    Returns:
        int64 ``[rows, K + 2]`` there: tokens, and in the last column how many of them the row emits.
    """
    verdict = drafts.new_zeros(len(drafts), drafts.shape[1] + 2)
    if session.is_leader:
        if not call.do_sample:
            judged = greedy(scores, drafts, counts)
        else:
            if probs is not None:
                probs = probs[:, : drafts.shape[1]].to(device=scores.device, dtype=scores.dtype, non_blocking=True)
            judged = RULES[acceptance](scores.softmax(dim=-1), drafts, counts, probs)
        verdict[:, :-1] = judged.tokens
        verdict[:, -1] = judged.accepted + 1
    return session.broadcast(verdict)
