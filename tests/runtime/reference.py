# SPDX-License-Identifier: Apache-2.0
"""Models, and what transformers decodes with them: the tokens and logits that an engine must reproduce."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from dcp_compile.capture import StepGraph, capture
from dcp_compile.compiler import compile_graph
from dcp_compile.config import DCPConfig
from dcp_compile.models.mini import mini_path
from dcp_compile.parallel import ParallelLayout
from dcp_compile.runtime import Engine
from tests.tiny_models import VOCAB, tiny_deepseek_v3, tiny_kimi_k3, tiny_kimi_linear

TOLERANCE = 1e-4
"""Largest difference of float32 logits that rounding may cause."""

_CLEAR = 1e-3  # gap between the two best logits below which a greedy token would depend on rounding
_CLEAR_CHOICE = 1e-5  # the same between the last expert that a router takes and the first that it leaves


def calm_kimi_k3(layers: int = 5, **settings: Any) -> Any:
    """A tiny Kimi-K3 whose rounding errors stay small.

    The mixture queries of :func:`tiny_kimi_k3` choose between blocks so sharply that a relative change of 1e-9 in the
    embeddings comes out 10 000 times larger, transformers' own float32 being off by 1e-2. Weaker queries mix as well;
    with twice these, one set of 35 prompts in 66 was off by more than TOLERANCE.
    """
    model = tiny_kimi_k3(layers, **{"attn_res_block_size": 2, **settings})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("res_proj.weight"):
                parameter.mul_(0.1)
    return model


def _endless(make: Callable[..., Any]) -> Callable[..., Any]:
    def run(**settings: Any) -> Any:
        model = make(**settings)
        model.generation_config.eos_token_id = None  # every row runs to its length limit
        return model

    return run


MODELS: dict[str, Callable[..., Any]] = {
    "kimi_k3": _endless(calm_kimi_k3),
    "kimi_linear": _endless(tiny_kimi_linear),
    "deepseek_v3": _endless(tiny_deepseek_v3),
}

TRAINED: dict[str, Callable[..., Any]] = {
    "mini": _endless(lambda: AutoModelForCausalLM.from_pretrained(mini_path(), dtype=torch.float32).eval()),
}

BLOCK = 8


@dataclass(frozen=True)
class Captured:
    """A model and its captured step: capture takes seconds, compiling it for one more setting a fraction of that."""

    model: Any
    graph: StepGraph

    def engine(self, parallel: ParallelLayout = ParallelLayout(), **settings: Any) -> Engine:
        """An engine with small pages and no speculation unless ``settings`` say otherwise."""
        small = {"block_size": BLOCK, "max_batch_size": 4, "max_seq_len": 128, "num_speculative_tokens": 0}
        config = DCPConfig(**{**small, "dcp_size": parallel.dcp_size, "tp_size": parallel.tp_size, **settings})
        return compile_graph(self.graph, config, parallel)[0]


@functools.cache
def captured(name: str) -> Captured:
    """One of MODELS, captured once per process."""
    model = MODELS[name]()
    return Captured(model, capture(model))


@dataclass(frozen=True)
class Reference:
    """Greedy decoding by transformers.

    Attributes:
        prompts: int64 ``[length]`` each.
        tokens: the continuations ``[rows, steps]``. logits: those they were chosen from, ``[rows, steps, vocab]``.
    """

    prompts: list[Tensor]
    tokens: Tensor
    logits: Tensor

    @property
    def steps(self) -> int:
        return self.tokens.shape[1]

    @property
    def longest(self) -> int:
        """Tokens of the longest row, continuation included."""
        return max(len(prompt) for prompt in self.prompts) + self.steps

    def rows(self, wanted: Sequence[int]) -> Reference:
        index = torch.tensor(list(wanted))
        return Reference([self.prompts[row] for row in wanted], self.tokens[index], self.logits[index])

    def up_to(self, length: int) -> Reference:
        """The rows whose prompts have at most ``length`` tokens."""
        return self.rows([row for row, prompt in enumerate(self.prompts) if len(prompt) <= length])


def decode_by_transformers(model: Any, lengths: Sequence[int], steps: int, seed: int) -> Reference:
    """Random prompts of the given lengths and their greedy continuations, by ``model.generate()``.

    A prompt on whose way two tokens, or two experts of a router, are nearly tied is replaced: its greedy tokens would
    prove nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    while len(found) < len(lengths):
        rows = [row for row in range(len(lengths)) if row not in found]
        prompts = [torch.randint(3, VOCAB, (lengths[row],), generator=generator) for row in rows]
        with _Choices(lengths=[len(prompt) for prompt in prompts]) as choices:
            tokens, logits = _generate(model, prompts, steps)
        best = logits.topk(2, dim=-1).values
        clear = (best[..., 0] - best[..., 1] > _CLEAR).all(dim=1) & (choices.least_gap > _CLEAR_CHOICE)
        found |= {row: (prompts[i], tokens[i], logits[i]) for i, row in enumerate(rows) if clear[i]}
    ordered = [found[row] for row in range(len(lengths))]
    return Reference([row[0] for row in ordered], *(torch.stack([row[part] for row in ordered]) for part in (1, 2)))


class _Choices(TorchFunctionMode):
    """Watches every ``topk`` of a model that runs left-padded prompts of the given lengths.

    Attributes:
        least_gap: ``[rows]`` on the CPU, between the least value taken and the greatest left, over all tokens but
            padding.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self._lengths = torch.tensor(lengths)
        self.least_gap = torch.full((len(lengths),), torch.inf)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.topk, Tensor.topk):
            self._watch(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _watch(self, input: Tensor, k: int, dim: int = -1, **_: Any) -> None:
        values = input.movedim(dim, -1)
        if k == values.shape[-1]:
            return
        border = values.topk(k + 1).values[..., k - 1 :].float().cpu()
        # Values that are masked out on both sides of the border are no choice.
        gap = (border[..., 0] - border[..., 1]).nan_to_num(nan=torch.inf).reshape(len(self._lengths), -1)
        tokens = values.shape[0] // len(self._lengths)
        gap = gap.unflatten(1, (tokens, -1)).amin(dim=2)
        if tokens > 1:
            padding = torch.arange(tokens) < (tokens - self._lengths)[:, None]
            gap = gap.masked_fill(padding, torch.inf)
        self.least_gap = torch.minimum(self.least_gap, gap.amin(dim=1))


def _generate(model: Any, prompts: list[Tensor], steps: int) -> tuple[Tensor, Tensor]:
    columns = max(len(prompt) for prompt in prompts)
    ids = torch.stack([torch.nn.functional.pad(prompt, (columns - len(prompt), 0)) for prompt in prompts])
    mask = torch.stack([(torch.arange(columns) >= columns - len(prompt)).long() for prompt in prompts])
    out = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return out.sequences[:, columns:], torch.stack(out.logits, dim=1).float()


@dataclass(frozen=True)
class Outcome:
    """How an engine's decoding differs from a reference: tokens that are not the same, and the largest logit error."""

    wrong_tokens: int
    error: float

    @property
    def good(self) -> bool:
        return self.wrong_tokens == 0 and self.error <= TOLERANCE


def largest(difference: Tensor) -> float:
    """Largest absolute value; infinite if there is any NaN, which would hide in a maximum."""
    return float(difference.abs().nan_to_num(nan=torch.inf).max())


def decode_greedily(engine: Engine, reference: Reference) -> Outcome:
    """Decode the reference's prompts as one batch, one token per step, feeding back what the engine itself chooses."""
    batch = len(reference.prompts)
    with engine.open(batch, reference.longest) as session:
        logits = [session.prefill(reference.prompts)]
        tokens = [session.broadcast(logits[0].argmax(dim=-1))]
        for _ in range(reference.steps - 1):
            logits.append(session.decode(tokens[-1], [True] * batch))
            tokens.append(session.broadcast(logits[-1].argmax(dim=-1)))
    return outcome(torch.stack(tokens, dim=1), torch.stack(logits, dim=1), reference)


def outcome(tokens: Tensor, logits: Tensor, reference: Reference) -> Outcome:
    """Rows whose tokens went astray count with their logits up to there."""
    wrong = tokens != reference.tokens
    strayed = wrong.cumsum(dim=1).roll(1, dims=1) > 0
    strayed[:, 0] = False
    error = torch.where(strayed[..., None], 0.0, logits - reference.logits)
    return Outcome(int(wrong.sum()), largest(error))
