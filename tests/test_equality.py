# SPDX-License-Identifier: Apache-2.0
"""The contract, in one process: the tokens of an optimised model are those of plain transformers, its logits within 1e-4.

The same on several ranks is in tests/distributed; ragged verify steps are in tests/runtime/test_verify.py.
"""

from __future__ import annotations

import functools

import pytest
import torch

import dcp_compile
from dcp_compile import DCPConfig, compiler
from tests.runtime.reference import (
    BLOCK,
    MODELS,
    TOLERANCE,
    Captured,
    Reference,
    capture,
    captured,
    decode_by_transformers,
    decode_greedily,
)
from tests.tiny_models import tiny_deepseek_v3

PROMPTS = 2 * BLOCK + 3  # every length up to two pages and three tokens


@functools.cache
def short(name: str) -> Reference:
    return decode_by_transformers(captured(name).model, list(range(1, PROMPTS + 1)), steps=4, seed=11)


@functools.cache
def long(name: str) -> Reference:
    return decode_by_transformers(captured(name).model, [311, 2, 240], steps=4, seed=12)


@pytest.mark.parametrize("layout, interleave", [("split", 1), ("flattened", 4), ("split", BLOCK)])
@pytest.mark.parametrize("name", MODELS)
def test_every_prompt_length(name: str, layout: str, interleave: int) -> None:
    engine = captured(name).engine(
        decode_layout=layout, kv_interleave=interleave, max_batch_size=PROMPTS, max_seq_len=long(name).longest
    )
    for reference, chunk in ((short(name), 5), (short(name), 64), (long(name), 100)):
        engine.config = engine.config.replace(prefill_chunk=chunk)
        assert decode_greedily(engine, reference).good


@pytest.mark.parametrize("name", MODELS)
def test_prefill_gives_the_logits_of_a_plain_forward_pass(name: str) -> None:
    """transformers without a cache, a mask or padding."""
    model, engine = captured(name).model, captured(name).engine(prefill_chunk=32)
    ids = long(name).prompts[2][:120]
    with torch.no_grad():
        expected = model(ids[None]).logits[0, -1]
    with engine.open(1, len(ids)) as session:
        found = session.prefill([ids])[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_generate_after_optimize_and_after_unoptimize(name: str, monkeypatch) -> None:
    """Ragged prompts with an end-of-sequence token, plain and with prompt lookup; then the model is as it was."""
    model = captured(name).model
    monkeypatch.setattr(compiler, "capture", lambda *_: captured(name).graph)  # it takes seconds
    reference = short(name).rows([18, 4, 0])
    columns = len(reference.prompts[0])
    ids = torch.stack([torch.nn.functional.pad(prompt, (columns - len(prompt), 0)) for prompt in reference.prompts])
    mask = torch.stack([torch.arange(columns) >= columns - len(prompt) for prompt in reference.prompts]).long()
    eos = int(reference.tokens[1, 2])
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    kind = type(model)
    assert dcp_compile.optimize(model, config=DCPConfig(block_size=BLOCK, max_batch_size=3, max_seq_len=64)) is model
    try:
        assert model.generate(ids, **options).equal(expected)
        assert model.generate(ids, **options, prompt_lookup_num_tokens=3).equal(expected)
    finally:
        dcp_compile.unoptimize(model)
    assert type(model) is kind
    assert model.generate(ids, **options).equal(expected)


@pytest.mark.parametrize("name", MODELS)
def test_float64_leaves_no_room_for_a_small_mistake(name: str) -> None:
    """What is left are the parts that models compute in float32 whatever their precision."""
    model = MODELS[name](layers=2, dtype=torch.float64)
    reference = decode_by_transformers(model, [41, 6], steps=4, seed=13)
    found = decode_greedily(Captured(model, capture(model)).engine(prefill_chunk=16), reference)
    assert found.wrong_tokens == 0 and found.error < 2e-6


def test_biases_around_attention() -> None:
    """A traced projection with a bias leaves the number of rows open."""
    model = tiny_deepseek_v3(2, attention_bias=True)
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    reference = decode_by_transformers(model, [1, 9, 4], steps=4, seed=13)
    assert decode_greedily(Captured(model, capture(model)).engine(), reference).good
