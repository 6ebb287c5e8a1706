# SPDX-License-Identifier: Apache-2.0
"""Model pairs, prompts, drafts and the chi-square test the generation tests share."""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from dcp_compile.generation.drafts import Proposal
from dcp_compile.generation.patch import attach
from tests.generation.reference_engine import ReferenceEngine
from tests.tiny_models import VOCAB, randomise

PAD = 0

# New for each run, the same in all workers of a distributed run.
_RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex


def fresh_seeds(name: str, count: int) -> list[int]:
    """Seeds that differ from run to run; the test ids show them."""
    draw = random.Random(f"{_RUN} {name}")
    return [draw.randrange(2**31) for _ in range(count)]


def tiny_qwen3(seed: int = 0, vocab_size: int = VOCAB) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=2,
    )
    return randomise(Qwen3ForCausalLM(config), seed)


@dataclass
class Pair:
    """A model as transformers runs it, and the same weights behind an engine."""

    make: Callable[..., Any]
    plain: Any
    compiled: Any
    engine: ReferenceEngine

    @staticmethod
    def of(make: Callable[..., Any]) -> Pair:
        compiled = make()
        engine = ReferenceEngine(compiled)
        attach(compiled, engine)
        return Pair(make, make(), compiled, engine)

    def continuation(self, inputs: dict[str, Any], count: int, **options: Any) -> list[list[int]]:
        """What transformers decodes without an end: the tokens of each row, without padding."""
        options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": count, **options}
        output = self.plain.generate(**inputs, **options)
        pads = (inputs["attention_mask"] == 0).sum(dim=1).tolist()
        return [row[pad:].tolist() for row, pad in zip(output, pads)]


def prompts(seed: int, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Left-padded random prompts without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    columns = max(lengths)
    ids = torch.randint(3, VOCAB, (len(lengths), columns), generator=generator)
    mask = (torch.arange(columns) >= columns - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


class Scripted:
    """A draft that proposes from known continuations; ``corrupt(row, position, token)`` may spoil any token of it.

    Records the calls it gets, and checks their order.
    """

    def __init__(
        self, rows: list[list[int]], corrupt: Callable[[int, int, int], int] = lambda row, at, token: token
    ) -> None:
        self._rows = rows
        self._corrupt = corrupt
        self.calls: list[str] = []
        self.kept: list[list[int]] = []
        self.limits: list[list[int]] = []

    def dcp_proposer(self) -> Scripted:
        return self

    def begin(self, session, prompts, sampling) -> None:
        assert session.lengths == [0] * len(prompts)
        self.calls.append("begin")
        self._session = session

    def propose(self, sequences, limits) -> Proposal:
        assert self.calls[-1] in ("begin", "commit")
        self.calls.append("propose")
        self.limits.append(list(limits))
        running = [limit > 0 for limit in limits]
        for row, runs in enumerate(running):  # the last token of a row is not committed yet
            assert not runs or self._session.lengths[row] == len(sequences[row]) - 1
        return Proposal.stack([self._tokens(row, len(sequences[row]), limit) for row, limit in enumerate(limits)])

    def commit(self, kept) -> None:
        assert self.calls[-1] == "propose"
        self.calls.append("commit")
        self.kept.append(list(kept))

    def close(self) -> None:
        self.calls.append("close")

    def _tokens(self, row: int, start: int, limit: int) -> Tensor:
        script = self._rows[row % len(self._rows)]
        tokens = [self._corrupt(row, at, script[at]) for at in range(start, min(start + limit, len(script)))]
        return torch.tensor(tokens, dtype=torch.int64)


def wrong(row: int, at: int, token: int) -> int:
    """Never the right token."""
    return (token + 1) % VOCAB


def sometimes_wrong(row: int, at: int, token: int) -> int:
    """Wrong at positions that differ from row to row, so that acceptance is ragged."""
    return wrong(row, at, token) if (at * (row + 2)) % (3 + row) == 0 else token


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        assert not self.ends
        self.values.append(value.tolist())

    def end(self) -> None:
        self.ends += 1


def chi_square_p(counts: Tensor, probs: Tensor) -> float:
    """The p-value of observed ``counts`` under exact ``probs``.

    Cells are pooled in order of their probability until each pool is expected 5 times: also where no outcome alone is.
    """
    counts, probs = counts.double().flatten(), probs.double().flatten()
    assert (counts[probs == 0] == 0).all(), "an impossible outcome was drawn"
    probs, order = probs.sort(descending=True)
    cells = zip(counts[order].tolist(), (probs * counts.sum()).tolist())
    pools = [[0.0, 0.0]]
    for observed, expected in cells:
        if pools[-1][1] >= 5:
            pools.append([0.0, 0.0])
        pools[-1][0] += observed
        pools[-1][1] += expected
    if pools[-1][1] < 5 and len(pools) > 2:
        rest = pools.pop()
        pools[-1] = [mine + more for mine, more in zip(pools[-1], rest)]
    if len(pools) == 1 or pools[-1][1] == 0:
        return 1.0  # only one outcome is possible, and it is what was drawn
    statistic = sum((observed - expected) ** 2 / expected for observed, expected in pools)
    half = torch.tensor([len(pools) - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))
