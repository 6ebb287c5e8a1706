# SPDX-License-Identifier: Apache-2.0
"""What needs a tokenizer: stop strings, token healing, text streamers and the pipeline."""

from __future__ import annotations

import pytest
from transformers import TextIteratorStreamer, TextStreamer, pipeline

from dcp_compile.errors import GenerationError
from tests.generation.helpers import Scripted, sometimes_wrong


def ids_of(tokenizer, texts):
    return tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)


TEXTS = ["badi", "kula muno rega"]


@pytest.mark.parametrize("texts", [TEXTS[:1], TEXTS])
def test_stop_strings(qwen, tokenizer, texts):
    inputs = ids_of(tokenizer, texts)
    script = qwen.continuation(inputs, 30)
    free = [tokenizer.decode(row[int(mask.sum()) :]) for row, mask in zip(script, inputs["attention_mask"])]
    stops = [free[0][7:10], free[-1][14:17]]  # in the middle of the text, across tokens
    options = {"do_sample": False, "max_new_tokens": 16, "stop_strings": stops, "tokenizer": tokenizer}
    expected = qwen.plain.generate(**inputs, **options)
    assert expected.shape[1] < inputs["input_ids"].shape[1] + 16
    assert qwen.compiled.generate(**inputs, **options).tolist() == expected.tolist()
    for draft in ({"assistant_model": Scripted(script)}, {"assistant_model": Scripted(script, sometimes_wrong)}):
        assert qwen.compiled.generate(**inputs, **options, **draft).tolist() == expected.tolist()


def test_token_healing(qwen, tokenizer):
    options = {
        "do_sample": False,
        "max_new_tokens": 4,
        "token_healing": True,
        "tokenizer": tokenizer,
        "eos_token_id": None,
    }
    healed = 0
    for tail in "bdgk":
        inputs = ids_of(tokenizer, [f"kula muno {tail}"])
        expected = qwen.plain.generate(**inputs, **options)
        healed += expected[0, : inputs["input_ids"].shape[1]].tolist() != inputs["input_ids"][0].tolist()
        assert qwen.compiled.generate(**inputs, **options).tolist() == expected.tolist()
        assert qwen.compiled.generate(**inputs, **options, prompt_lookup_num_tokens=3).tolist() == expected.tolist()
    assert healed and qwen.engine.opened == qwen.engine.closed


HEALING = {"do_sample": False, "max_new_tokens": 4, "token_healing": True, "eos_token_id": None}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("special", [False, True])
def test_token_healing_that_changes_the_number_of_tokens(qwen, tokenizer, masked, special):
    """White space at the end and special tokens are gone when the prompt is tokenised anew; its mask stays as is."""
    inputs = ids_of(tokenizer, ["<s>kula muno b " if special else "kula muno b "])
    mask = {"attention_mask": inputs["attention_mask"]} if masked else {}
    expected = qwen.plain.generate(inputs["input_ids"], **mask, **HEALING, tokenizer=tokenizer)
    assert expected.shape[1] - 4 < inputs["input_ids"].shape[1]
    for draft in ({}, {"prompt_lookup_num_tokens": 3}):
        found = qwen.compiled.generate(inputs["input_ids"], **mask, **draft, **HEALING, tokenizer=tokenizer)
        assert found.tolist() == expected.tolist()


def test_token_healing_of_padded_prompts(qwen, tokenizer):
    """As in transformers while the columns stay the same; other columns leave open which of them are padding."""
    inputs = ids_of(tokenizer, ["kula muno b", "ba g"])
    expected = qwen.plain.generate(**inputs, **HEALING, tokenizer=tokenizer)
    assert qwen.compiled.generate(**inputs, **HEALING, tokenizer=tokenizer).tolist() == expected.tolist()
    shorter = ids_of(tokenizer, ["kula muno b ", "ba g"])
    with pytest.raises(GenerationError, match="token_healing tokenised the prompts anew: 6 columns, .* of 7 no longer"):
        qwen.compiled.generate(**shorter, **HEALING, tokenizer=tokenizer)
    assert qwen.engine.opened == qwen.engine.closed


def test_text_streamers(qwen, tokenizer, capsys):
    inputs = ids_of(tokenizer, ["badi"])
    script = qwen.continuation(inputs, 30)
    options = {"do_sample": False, "max_new_tokens": 8}
    printed = []
    for model, draft in ((qwen.plain, {}), (qwen.compiled, {}), (qwen.compiled, {"assistant_model": Scripted(script)})):
        model.generate(**inputs, **options, **draft, streamer=TextStreamer(tokenizer))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == printed[2] and printed[0].strip()
    streamer = TextIteratorStreamer(tokenizer, timeout=5)
    qwen.compiled.generate(**inputs, **options, streamer=streamer)
    assert "".join(streamer) in printed[0]


def test_text_streamers_are_for_one_sequence(qwen, tokenizer):
    """transformers' own error would come from the leader alone, and leave the other ranks a call behind."""
    opened = qwen.engine.opened
    with pytest.raises(GenerationError, match="TextStreamer shows one sequence, but the call has 2"):
        qwen.compiled.generate(**ids_of(tokenizer, TEXTS), max_new_tokens=2, streamer=TextStreamer(tokenizer))
    assert qwen.engine.opened == opened


@pytest.mark.parametrize("batch_size", [1, 2])
def test_pipeline(qwen, tokenizer, batch_size):
    options = {"max_new_tokens": 6, "do_sample": False}
    results = []
    for model in (qwen.plain, qwen.compiled):
        generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
        results.append(generator(TEXTS, batch_size=batch_size, **options))
    assert results[0] == results[1] and len(results[0]) == 2
    assisted = pipeline("text-generation", model=qwen.compiled, tokenizer=tokenizer, assistant_model=qwen.make(seed=6))
    before = qwen.engine.drafted
    assert assisted(TEXTS, batch_size=batch_size, num_assistant_tokens=2, **options) == results[0]
    assert qwen.engine.drafted > before
