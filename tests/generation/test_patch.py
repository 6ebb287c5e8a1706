# SPDX-License-Identifier: Apache-2.0
"""Attaching an engine changes how a model generates and nothing else, and can be undone exactly."""

from __future__ import annotations

import copy
import inspect
import io
import json
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from dcp_compile.errors import UnsupportedModelError
from dcp_compile.generation import api
from dcp_compile.generation.patch import attach, detach, is_attached
from tests.generation.helpers import Recorder, tiny_qwen3
from tests.generation.reference_engine import ReferenceEngine

IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def attached():
    model = tiny_qwen3()
    attach(model, ReferenceEngine(model))
    return model


def test_the_class_looks_the_same(attached):
    plain = tiny_qwen3()
    assert isinstance(attached, Qwen3ForCausalLM) and type(attached) is not Qwen3ForCausalLM
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(attached), name) == getattr(Qwen3ForCausalLM, name)
    assert repr(attached) == repr(plain)
    assert inspect.signature(attached.generate) == inspect.signature(plain.generate)
    assert inspect.signature(attached.forward) == inspect.signature(plain.forward)
    assert attached.generate.__doc__ == plain.generate.__doc__
    assert type(attached).can_generate() and attached.config_class is plain.config_class
    assert list(attached.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in attached.named_modules()] == [name for name, _ in plain.named_modules()]
    other = tiny_qwen3()
    attach(other, ReferenceEngine(other))
    assert type(other) is type(attached)


@pytest.mark.parametrize("change", [
    lambda model: model.bfloat16(),
    lambda model: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True),
    lambda model: model.model.rotary_emb.register_buffer("inv_freq", model.model.rotary_emb.inv_freq + 1),
])  # fmt: skip
def test_weights_that_were_replaced_are_noticed(attached, change):
    attached.generate(IDS, max_new_tokens=2, do_sample=False)
    change(attached)
    with pytest.raises(UnsupportedModelError, match="was moved, converted or replaced after it was compiled.*unoptimize"):
        attached.generate(IDS, max_new_tokens=2, do_sample=False)


def test_forward_is_untouched(attached):
    plain = tiny_qwen3()
    torch.testing.assert_close(attached(IDS).logits, plain(IDS).logits, rtol=0, atol=0)
    assert attached(IDS, output_hidden_states=True).hidden_states is not None
    assert attached(IDS, labels=IDS).loss.requires_grad


def test_detach_restores_everything():
    model = tiny_qwen3()
    before = dict(vars(model))
    config, generation_config = copy.deepcopy(model.config.to_dict()), model.generation_config.to_dict()
    expected = model.generate(IDS, max_new_tokens=5, do_sample=False).tolist()
    for _ in range(2):
        engine = ReferenceEngine(model)
        attach(model, engine)
        assert is_attached(model)
        assert (
            model.generate(IDS, max_new_tokens=5, do_sample=False).tolist() == expected
            and engine.opened == engine.closed == 1
        )
        detach(model)
        assert not is_attached(model)
        assert type(model) is Qwen3ForCausalLM
        assert vars(model).keys() == before.keys() and all(vars(model)[name] is before[name] for name in before)
        assert model.config.to_dict() == config and model.generation_config.to_dict() == generation_config
        assert model.generate(IDS, num_beams=2, max_new_tokens=5).shape[0] == 1 and engine.opened == 1


def test_save_and_load(attached, tmp_path):
    attached.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is Qwen3ForCausalLM
    torch.testing.assert_close(loaded(IDS).logits, attached(IDS).logits, rtol=0, atol=0)


def test_pickles_hold_the_plain_model(attached):
    vars(attached)["_dcp"] = lambda: None  # what optimize() notes on the model; it cannot be pickled
    for loaded in (pickle.loads(pickle.dumps(attached)), saved_and_loaded(attached)):
        assert type(loaded) is Qwen3ForCausalLM and not [name for name in vars(loaded) if name.startswith("_dcp")]
        torch.testing.assert_close(loaded(IDS).logits, attached(IDS).logits, rtol=0, atol=0)
    assert is_attached(attached)


def saved_and_loaded(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_threads_take_turns(attached):
    """A second call waits for the first, which may itself call generate(), as a processor of guided decoding does."""
    opened, most = 0, 0
    engine = vars(attached)["_dcp_engine"]
    begin, wanted = engine.open, attached.generate(IDS, max_new_tokens=4, do_sample=False).tolist()

    class Counting:
        def __init__(self, session):
            self._session = session

        def __enter__(self):
            nonlocal opened, most
            opened, most = opened + 1, max(most, opened + 1)
            time.sleep(0.05)
            return self._session.__enter__()

        def __exit__(self, *exc_info):
            nonlocal opened
            opened -= 1
            return self._session.__exit__(*exc_info)

    engine.open = lambda *arguments: Counting(begin(*arguments))
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(attached.generate, IDS, max_new_tokens=4, do_sample=False) for _ in range(3)]
        assert [call.result().tolist() for call in calls] == [wanted] * 3
    assert most == 1
    within = lambda ids, scores: (attached.generate(IDS, max_new_tokens=1), scores)[1]  # noqa: E731
    assert attached.generate(IDS, max_new_tokens=4, do_sample=False, logits_processor=[within]).tolist() == wanted


def test_copies_are_refused(attached):
    with pytest.raises(UnsupportedModelError, match="unoptimize"):
        copy.deepcopy(attached)


def test_attaching_and_detaching_twice(attached):
    with pytest.raises(UnsupportedModelError, match="unoptimize"):
        attach(attached, ReferenceEngine(attached))
    detach(attached)
    with pytest.raises(UnsupportedModelError, match="not optimised"):
        detach(attached)
    with pytest.raises(UnsupportedModelError, match="optimize"):
        api.generate(attached, IDS)


def test_models_that_cannot_be_attached():
    backbone = tiny_qwen3().model
    with pytest.raises(UnsupportedModelError, match="AutoModelForCausalLM"):
        attach(backbone, None)
    model = tiny_qwen3()
    model.generate = lambda *args, **kwargs: None
    with pytest.raises(UnsupportedModelError, match="generate on the instance"):
        attach(model, None)
    assert type(model) is Qwen3ForCausalLM and "_dcp_engine" not in vars(model)


def test_a_class_with_its_own_generate():
    class Own(Qwen3ForCausalLM):
        def generate(self, *args, **options):
            return super().generate(*args, max_new_tokens=3, **options)

    model = tiny_qwen3()
    model.__class__ = Own
    expected = model.generate(IDS, do_sample=False).tolist()
    engine, streamer = ReferenceEngine(model), Recorder()
    attach(model, engine)
    assert model.generate(IDS, do_sample=False, streamer=streamer).tolist() == expected and engine.opened == 1
    assert streamer.values[0] == IDS.tolist() and len(streamer.values) == 4 and streamer.ends == 1
    detach(model)
    assert type(model) is Own


def test_a_session_is_closed_after_an_error(attached):
    engine = vars(attached)["_dcp_engine"]

    def fail(ids, scores):
        raise ZeroDivisionError

    for options in ({}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(ZeroDivisionError):
            attached.generate(IDS, max_new_tokens=4, logits_processor=[fail], **options)
    assert engine.opened == engine.closed == 2


def test_typos_are_still_caught(attached):
    with pytest.raises(ValueError, match="max_new_token"):
        attached.generate(IDS, max_new_token=4)
    with pytest.raises(ValueError, match="Input length"):
        attached.generate(IDS, max_length=3)
