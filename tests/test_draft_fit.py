# SPDX-License-Identifier: Apache-2.0
"""Drafts that do not fit their target are refused by name, with the model as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

import dcp_compile
from dcp_compile.errors import ConfigError, GenerationError, UnsupportedModelError
from dcp_compile.models.k3_dspark import K3DSparkConfig, K3DSparkModel
from tests.model_state import changes, state_of
from tests.models.k3_dspark.tiny_draft import draft_for
from tests.runtime.test_draft import PAGES
from tests.runtime.test_replicated_draft import draft_for as grouped_draft
from tests.tiny_models import tiny_kimi_k3, tiny_kimi_linear

CONFIG = dcp_compile.DCPConfig(**PAGES)


def grouped_draft_for(target):
    return grouped_draft(target.config, seed=0)


MESSAGES = {
    "bfloat16": "the draft's weights are torch.bfloat16, the target's torch.float32; load the draft with dtype=torch.float32",
    "meta": "the draft is on meta, the target on cpu; load the draft there",
}


@pytest.mark.parametrize("how", MESSAGES)
def test_a_draft_of_another_type_or_on_another_device(how: str) -> None:
    """In optimize(), in the call that brings it, and where it was converted since it was compiled."""
    target = tiny_kimi_k3(5)
    draft = draft_for(target)
    wrong = copy.deepcopy(draft)
    wrong = wrong.to(torch.bfloat16) if how == "bfloat16" else wrong.to("meta")
    before = state_of(target)
    with pytest.raises(ConfigError, match=MESSAGES[how]):
        dcp_compile.optimize(target, config=CONFIG, draft=wrong)
    assert changes(before, state_of(target)) == []

    model, ids = dcp_compile.optimize(target, config=CONFIG), torch.randint(3, 60, (1, 6))
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    wanted = model.generate(ids, **options)
    with pytest.raises(ConfigError, match=MESSAGES[how]):
        model.generate(ids, assistant_model=wrong, **options)
    assert torch.equal(model.generate(ids, assistant_model=draft, **options), wanted)
    if how == "bfloat16":
        draft.to(torch.bfloat16)
        with pytest.raises(ConfigError, match=MESSAGES[how]):
            model.generate(ids, assistant_model=draft, **options)


@pytest.mark.parametrize("make", [draft_for, grouped_draft_for])
def test_a_draft_whose_tensors_were_replaced(make: Callable) -> None:
    """Values that were changed in place are used; other tensors are no longer what runs."""
    target = tiny_kimi_k3(5)
    draft = make(target)
    model, ids = dcp_compile.optimize(target, config=CONFIG, draft=draft), torch.randint(3, 60, (1, 6))
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "assistant_model": draft}
    wanted = model.generate(ids, **options)
    draft.to("cpu")  # where it is
    assert torch.equal(model.generate(ids, **options), wanted)
    draft.load_state_dict({name: value.clone() for name, value in draft.state_dict().items()}, assign=True)
    with pytest.raises(UnsupportedModelError, match=f"{type(draft).__name__}: .* replaced after it was compiled"):
        model.generate(ids, **options)


def test_a_draft_for_fewer_tokens() -> None:
    target = tiny_kimi_k3(5)
    limit = CONFIG.max_seq_len - 1
    with pytest.raises(ConfigError, match=rf"max_seq_len={limit + 1}, but .* max_position_embeddings={limit}; call optimize"):
        dcp_compile.optimize(target, config=CONFIG, draft=draft_for(target, max_position_embeddings=limit))
    assert not hasattr(target, "_dcp")


def test_a_call_that_is_refused_compiles_no_draft() -> None:
    """Bad prompts are found before the draft is brought in, which would compile the target anew."""
    model = dcp_compile.optimize(tiny_kimi_k3(5), config=CONFIG)
    draft, engine = draft_for(model), model._dcp_engine
    mask = torch.tensor([[1, 0, 1, 1]])
    with pytest.raises(GenerationError, match="padding_side='left'"):
        model.generate(torch.randint(3, 60, (1, 4)), attention_mask=mask, max_new_tokens=4, assistant_model=draft)
    assert model._dcp_engine is engine and model._dcp.draft is None


def test_a_target_that_gives_no_hidden_states() -> None:
    target = tiny_kimi_linear()
    before = state_of(target)
    with pytest.raises(UnsupportedModelError, match=r"KimiLinearForCausalLM gives no hidden states.*has no tap_layers"):
        dcp_compile.optimize(target, config=CONFIG, draft=draft_for(target, taps=(0, 1)))
    assert changes(before, state_of(target)) == []


def test_a_draft_of_another_width_than_the_targets_embeddings() -> None:
    target = tiny_kimi_k3(5)
    width = target.config.hidden_size
    settings = draft_for(target).config.to_dict() | {"hidden_size": width // 2, "target_hidden_size": width}
    draft = K3DSparkModel(K3DSparkConfig.from_dict(settings)).eval()
    with pytest.raises(ConfigError, match=f"hidden_size={width // 2}, but the target's embeddings.* are {width} wide"):
        dcp_compile.optimize(target, config=CONFIG, draft=draft)


def test_backends_that_the_draft_did_not_get_are_explained(monkeypatch) -> None:
    target = tiny_kimi_k3(5)
    text = dcp_compile.explain(dcp_compile.optimize(target, config=CONFIG, draft=draft_for(target)))
    _, of_the_draft = text.split("draft K3DSparkModel: ")
    assert "backend torch" in of_the_draft and "\n  not hopper: " in of_the_draft and "\n  not triton: " in of_the_draft
