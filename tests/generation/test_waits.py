# SPDX-License-Identifier: Apache-2.0
"""What may wait for another rank is waited for with a limit: nothing else in generate() reads what a step gives.

On a CPU every read succeeds at once. So tensors that steps give, and what is computed from them, are marked here, and
the device counts as busy from a step until the session waits: a read in between is noted, and so is a blocking copy to
the device, which waits for it as well.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import StoppingCriteria, StoppingCriteriaList

import dcp_compile
from dcp_compile.generation import loop
from dcp_compile.generation.ahead import Rounds
from dcp_compile.generation.columns import Columns
from dcp_compile.parallel import ParallelLayout
from dcp_compile.runtime import Session
from dcp_compile.runtime.draft import DraftEngine
from tests.generation.helpers import tiny_qwen3
from tests.models.k3_dspark.tiny_draft import draft_for
from tests.runtime.reference import MODELS

_READS = {
    Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__index__, Tensor.cpu, Tensor.numpy, Tensor.nonzero,
    torch.nonzero,
}  # fmt: skip


class Device(TorchFunctionMode):
    """Attributes: busy. noted: what read it while it was."""

    def __init__(self) -> None:
        super().__init__()
        self.busy, self.noted = False, []

    def holds(self, value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(self.holds, value))
        return isinstance(value, Tensor) and getattr(value, "_on_device", False)

    def take(self, value: Any) -> Any:
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, Tensor):
                tensor._on_device = True
        return value

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [*args, *kwargs.values()]
        there = any(map(self.holds, inputs))
        if self.busy:
            places = [value for value in inputs if isinstance(value, torch.device)]
            sends = function is Tensor.to and places and not self.holds(args[0]) and not kwargs.get("non_blocking")
            makes = function is torch.tensor and isinstance(kwargs.get("device"), torch.device)
            if (function in _READS and self.holds(args[0])) or sends or makes:
                self.noted.append(function.__name__)
        found = function(*args, **kwargs)
        return self.take(found) if there and function not in _READS else found

    def working(self, function, with_others: bool = True):
        """``function``, which copies its inputs as it likes and gives results on the device, after other ranks if they take
        part in it."""

        def run(*args):
            before, self.busy = self.busy, False
            found = function(*args)
            self.busy = before or with_others
            return self.take(found)

        return run


@pytest.fixture
def device(monkeypatch) -> Device:
    device = Device()

    def wait(self, arrived=None) -> None:
        device.busy = device.busy and arrived is not None  # a round that was launched meanwhile is still under way

    def fetch(self, tensor: Tensor) -> Tensor:
        self.wait()
        found = tensor.clone()
        found._on_device = False
        return found

    launch, begin = Rounds.launch, Columns.__init__

    def begun(self, *args) -> None:
        begin(self, *args)
        self._ids = device.take(self._ids.clone())  # the caller works there

    def launched(self, wanted):
        found = launch(self, wanted)
        verdict = found.verdict.clone()  # on its way to the host
        verdict._on_device = False
        device.busy = True
        return dataclasses.replace(found, verdict=verdict, arrived=object())

    monkeypatch.setattr(Session, "_run", device.working(Session._run))
    monkeypatch.setattr(DraftEngine, "run_block", device.working(DraftEngine.run_block))
    monkeypatch.setattr(DraftEngine, "ingest", device.working(DraftEngine.ingest, with_others=False))
    monkeypatch.setattr(ParallelLayout, "wait", wait)
    monkeypatch.setattr(ParallelLayout, "fetch", fetch)
    monkeypatch.setattr(Rounds, "launch", launched)
    monkeypatch.setattr(Columns, "__init__", begun)
    monkeypatch.setattr(loop, "_sent", lambda tensor, place: device.take(tensor.clone()))
    return device


class Nosy(StoppingCriteria):
    """Reads tokens on the host."""

    def __call__(self, input_ids, scores, **unused):
        return torch.full((len(input_ids),), input_ids[0, -1].item() < 0)


@pytest.fixture(scope="module", params=["full", "adaptive"])
def compiled(request) -> tuple[Any, Any]:
    model = MODELS["kimi_k3"](layers=3, seed=1)
    draft = draft_for(model, (0, 1), 1)
    settings = {"block_size": 4, "max_batch_size": 3, "max_seq_len": 64, "num_speculative_tokens": 4, "prefill_chunk": 4}
    config = dcp_compile.DCPConfig(verify=request.param, **settings)
    return dcp_compile.optimize(model, config=config, draft=draft), draft


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 9},
    "with processors that read tokens": {"repetition_penalty": 1.2, "bad_words_ids": [[3], [4, 5]]},
    "with criteria that read tokens": {"stopping_criteria": StoppingCriteriaList([Nosy()])},
}


@pytest.mark.parametrize("drafts", ["none", "dspark", "lookup", "another model"])
@pytest.mark.parametrize("call", CALLS)
def test_nothing_reads_a_step_that_was_not_waited_for(compiled, device, call: str, drafts: str) -> None:
    model, draft = compiled
    speculation = {
        "none": {}, "dspark": {"assistant_model": draft}, "lookup": {"prompt_lookup_num_tokens": 3},
        "another model": {"assistant_model": tiny_qwen3()},
    }[drafts]  # fmt: skip
    ids = torch.randint(3, 100, (1, 9))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **CALLS[call], **speculation}
    with device:
        model.generate(ids, **options)
    assert not device.noted and not device.busy


def test_a_read_that_nobody_waited_for_is_noted(compiled, device, monkeypatch) -> None:
    monkeypatch.setattr(Session, "wait", lambda self, arrived=None: None)
    with device:
        compiled[0].generate(torch.randint(3, 100, (1, 9)), max_new_tokens=4, do_sample=False, bad_words_ids=[[3], [4, 5]])
    assert device.noted
