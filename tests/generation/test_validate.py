# SPDX-License-Identifier: Apache-2.0
"""What cannot be honoured is refused before anything changes; what has no effect is warned about."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation import GenerationMode

from dcp_compile.errors import CapacityError, GenerationError
from dcp_compile.generation import validate
from dcp_compile.generation.drafts import Proposal
from tests.generation.helpers import Recorder, Scripted, prompts, tiny_qwen3
from tests.tiny_models import VOCAB

IDS = torch.tensor([[5, 6, 7, 8]])
SYNTHID = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])
DRAFT = object()  # stands for a valid draft

REFUSED = {
    "beam": ({"num_beams": 3}, "num_beams=1"),
    "beam_sample": ({"num_beams": 2, "do_sample": True}, "num_beams=1"),
    "beam_with_draft": ({"num_beams": 2, "assistant_model": DRAFT}, "num_beams=1"),
    "group_beam": ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "num_beam_groups"),
    "constrained": ({"num_beams": 2, "force_words_ids": [[5]]}, "force_words_ids"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=None"),
    "dola": ({"dola_layers": "low"}, "dola_layers=None"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "hidden_states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    "no_cache": ({"use_cache": False}, "use_cache"),
    "static": ({"cache_implementation": "static"}, "'static'"),
    "quantized": ({"cache_implementation": "quantized"}, "'quantized'"),
    "offloaded": ({"cache_implementation": "offloaded"}, "'offloaded'"),
    "paged": ({"cache_implementation": "paged"}, "paged"),
    "cache": ({"past_key_values": DynamicCache()}, "input_ids"),
    "custom_generate": ({"custom_generate": lambda *args, **kwargs: None}, "custom_generate"),
    "custom_repository": ({"custom_generate": "somebody/something"}, "custom_generate"),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 3, 32)}, "input_ids"),
    "positions": ({"position_ids": torch.arange(4)[None]}, "attention_mask"),
    "guidance": ({"guidance_scale": 1.5}, "use 1"),
    "ensemble": ({"assistant_model": DRAFT, "assistant_ensemble_weight": 0.5}, "lossless"),
    "early_exit": ({"assistant_early_exit": 1}, "assistant_model"),
    "mtp": ({"use_mtp": True}, "assistant_model"),
    "assistant_tokenizer": ({"assistant_model": DRAFT, "assistant_tokenizer": object()}, "vocabulary"),
    "two_drafts": ({"assistant_model": DRAFT, "prompt_lookup_num_tokens": 3}, "one of them"),
    "vocabulary": ({"assistant_model": tiny_qwen3(vocab_size=VOCAB + 1)}, f"{VOCAB + 1} tokens, the target {VOCAB}"),
    "not_a_draft": ({"assistant_model": torch.nn.Linear(2, 2).eval()}, "dcp_proposer"),
    "headless_draft": ({"assistant_model": tiny_qwen3().model}, "dcp_proposer"),
    "training_draft": ({"assistant_model": tiny_qwen3().train()}, "eval"),
    "no_lookup": ({"prompt_lookup_num_tokens": 0}, "at least 1"),
    "no_assistant_tokens": ({"assistant_model": DRAFT, "num_assistant_tokens": 0}, "at least 1"),
    "acceptance": ({"assistant_model": DRAFT, "acceptance": "lossy"}, "'standard', 'block'"),
    "acceptance_alone": ({"acceptance": "block"}, "assistant_model"),
    "synthid_with_draft": (
        {"do_sample": True, "watermarking_config": SYNTHID, "assistant_model": DRAFT},
        "without assistant",
    ),
    "right_padding": ({"attention_mask": torch.tensor([[1, 1, 1, 0]])}, "padding_side='left'"),
    "hole": ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "padding_side='left'"),
    "empty_prompt": ({"attention_mask": torch.tensor([[0, 0, 0, 0]])}, "empty"),
    "mask_list": ({"attention_mask": [[1, 1, 1, 1]]}, "attention_mask is a list; expected a tensor"),
    "mask_shape": ({"attention_mask": torch.tensor([[1, 1, 1]])}, "equal"),
    "no_rows": ({"input_ids": torch.zeros(0, 4, dtype=torch.int64)}, r"\[0, 4\]"),
    "no_columns": ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, r"\[1, 0\]"),
    "flat": ({"input_ids": torch.tensor([4, 5])}, r"\[2\]"),
    "list": ({"input_ids": [[4, 5]]}, "return_tensors"),
    "floats": ({"input_ids": torch.ones(1, 4)}, "torch.float32 tensor"),
    "id_too_large": ({"input_ids": torch.tensor([[5, VOCAB]])}, rf"{VOCAB}; .*\[0, {VOCAB}\)"),
    "id_negative": ({"input_ids": torch.tensor([[-1, 5]])}, "-1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_changes(qwen, name):
    options, message = REFUSED[name]
    draft = Scripted([[5, 6, 7, 8, 9, 9, 9]])
    options = {key: draft if value is DRAFT else value for key, value in options.items()}
    streamer, state = Recorder(), torch.get_rng_state()
    opened = qwen.engine.opened
    with pytest.raises(GenerationError, match=message):
        qwen.compiled.generate(**{"input_ids": IDS, "max_new_tokens": 3, "streamer": streamer, **options})
    assert qwen.engine.opened == opened and not streamer.values and not streamer.ends and not draft.calls
    assert torch.equal(state, torch.get_rng_state())


def test_autocast_is_refused(qwen):
    """Its types are not those of the compiled steps."""
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(GenerationError, match="autocast is on for cpu.*float32"):
        qwen.compiled.generate(IDS, max_new_tokens=3)


def test_every_mode_is_supported_or_has_a_way_out():
    for mode in GenerationMode:
        if mode in validate.SUPPORTED_MODES:
            validate.check_mode(mode)
        else:
            with pytest.raises(GenerationError, match="use (num_beams=1|no constraints|penalty_alpha|dola_layers)"):
                validate.check_mode(mode)


def test_settings_of_the_models_own_config_are_checked_too(qwen):
    config = qwen.compiled.generation_config
    config.num_beams = 4
    try:
        with pytest.raises(GenerationError, match="beam_search"):
            qwen.compiled.generate(IDS, max_new_tokens=3)
    finally:
        config.num_beams = None


def test_stateful_processors_work_without_a_draft(qwen):
    for options in (
        {"do_sample": True, "watermarking_config": SYNTHID},
        {
            "logits_processor": lambda model: UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model),
            "do_sample": False,
        },
    ):
        outputs = []
        for model in (qwen.plain, qwen.compiled):
            own = dict(options)
            if "logits_processor" in own:
                own["logits_processor"] = LogitsProcessorList([own["logits_processor"](model)])
            torch.manual_seed(3)
            outputs.append(model.generate(IDS, max_new_tokens=6, **own).tolist())
        assert outputs[0] == outputs[1]
    processors = LogitsProcessorList([UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, qwen.compiled)])
    with pytest.raises(GenerationError, match="without assistant_model"):
        qwen.compiled.generate(IDS, max_new_tokens=6, prompt_lookup_num_tokens=2, logits_processor=processors)


def test_training_mode(qwen):
    qwen.compiled.train()
    try:
        with pytest.raises(GenerationError, match="eval"):
            qwen.compiled.generate(IDS, max_new_tokens=3)
    finally:
        qwen.compiled.eval()


def test_an_engine_without_verify_steps_takes_no_drafts(qwen, monkeypatch):
    monkeypatch.setattr(qwen.engine, "max_query_rows", 1)
    with pytest.raises(GenerationError, match="num_speculative_tokens"):
        qwen.compiled.generate(IDS, max_new_tokens=3, prompt_lookup_num_tokens=2)
    assert qwen.compiled.generate(IDS, max_new_tokens=3, do_sample=False).shape == (1, 7)


def test_capacity(qwen):
    streamer, opened = Recorder(), qwen.engine.opened
    with pytest.raises(CapacityError, match=str(qwen.engine.max_length)):
        qwen.compiled.generate(IDS, max_new_tokens=qwen.engine.max_length, streamer=streamer)
    with pytest.raises(CapacityError):
        qwen.compiled.generate(IDS, max_new_tokens=2, do_sample=True, num_return_sequences=qwen.engine.max_batch + 1)
    assert qwen.engine.opened == opened and not streamer.values


def test_continuous_batching(qwen):
    for method in ("generate_batch", "init_continuous_batching"):
        with pytest.raises(GenerationError, match=r"generate\(\)"):
            getattr(qwen.compiled, method)([[1, 2]])


IGNORED = {
    "compile_config": CompileConfig(),
    "prefill_chunk_size": 2,
    "assistant_confidence_threshold": 0.9,
    "num_assistant_tokens_schedule": "heuristic",
    "synced_gpus": True,
}


@pytest.mark.parametrize("name", IGNORED)
def test_settings_without_effect_are_warned_about(qwen, name):
    expected = qwen.plain.generate(IDS, max_new_tokens=4, do_sample=False).tolist()
    with pytest.warns(UserWarning, match=f"{name} is ignored") as caught:
        output = qwen.compiled.generate(IDS, max_new_tokens=4, do_sample=False, **{name: IGNORED[name]})
    assert output.tolist() == expected
    assert __file__ in [warning.filename for warning in caught]  # it points at the call


@pytest.mark.parametrize("name", [name for name in IGNORED if name != "synced_gpus"])
def test_settings_without_effect_in_a_config_are_warned_about(qwen, name):
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=2, **{name: IGNORED[name]})
    with pytest.warns(UserWarning, match=f"{name} is ignored"):
        assert qwen.compiled.generate(IDS, generation_config=config).shape == (1, 8)


def test_an_ordinary_call_warns_of_nothing(qwen):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qwen.compiled.generate(**prompts(1, [3, 4]), max_new_tokens=3, do_sample=False, prompt_lookup_num_tokens=2)


def test_other_inputs_of_forward(qwen):
    with pytest.raises(GenerationError, match="cache_position, token_type_ids"):
        validate.check_model_kwargs(
            {"token_type_ids": IDS, "cache_position": IDS, "use_cache": True, "inputs_embeds": None}
        )


@pytest.mark.parametrize(
    ("tokens", "counts", "probs", "message"),
    [
        ([[1, 2]], [2], None, "1 rows"),
        ([[1, 2], [3, 4]], [2], None, "counts: 1"),
        ([[1, 2], [3, 4]], [2, 2], None, r"limits are \[2, 1\]"),
        ([[1], [3]], [2, 1], None, "1 columns"),
        ([[1, 2], [3, 4]], [-1, 1], None, "proposed"),
        ([[1, 9], [3, 4]], [2, 1], None, r"\[0, 8\)"),
        ([[1.0, 2.0], [3.0, 4.0]], [2, 1], None, "type torch.float32; token ids are int64"),
        ([[1, -1], [3, 4]], [2, 1], None, r"\[0, 8\)"),
        ([[1, 2], [3, 4]], [2, 1], (2, 2, 7), r"\[2, 2, 7\]"),
    ],
)
def test_proposals_that_break_the_contract(tokens, counts, probs, message):
    probs = None if probs is None else torch.zeros(probs)
    with pytest.raises(GenerationError, match=message):
        validate.check_proposal(Proposal(torch.tensor(tokens), counts, probs), [2, 1], 8)


def test_ids_past_a_count_are_not_checked():
    validate.check_proposal(Proposal(torch.tensor([[1, 99], [-5, -5]]), [1, 0]), [2, 1], 8)
