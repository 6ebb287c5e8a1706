# SPDX-License-Identifier: Apache-2.0
"""What the compiled decode path refuses or ignores. Refusals come before any state changes and name the way out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import GenerationMode

from ..drafting import is_dspark
from ..errors import GenerationError
from .acceptance import RULES
from .interface import Engine
from .processors import is_stateful

if TYPE_CHECKING:
    from .drafts import Proposal

SUPPORTED_MODES = [GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION]
UNOPTIMIZE = "call dcp_compile.unoptimize(model) first to use transformers' own loop"

_MODE_SWITCHES = {
    GenerationMode.BEAM_SEARCH: "num_beams=1",
    GenerationMode.BEAM_SAMPLE: "num_beams=1",
    GenerationMode.GROUP_BEAM_SEARCH: "num_beams=1 and no num_beam_groups",
    GenerationMode.CONSTRAINED_BEAM_SEARCH: "no constraints and no force_words_ids",
    GenerationMode.CONTRASTIVE_SEARCH: "penalty_alpha=None",
    GenerationMode.DOLA_GENERATION: "dola_layers=None",
}

_REFUSED_ARGUMENTS = {
    "custom_generate": "it would replace the compiled decoding loop",
    "cache": "the compiled model keeps its own paged cache; pass all tokens in input_ids",
    "past_key_values": "the compiled model keeps its own paged cache; pass all tokens in input_ids",
    "cache_params": "the compiled model keeps its own paged cache; pass all tokens in input_ids",
    "inputs_embeds": "the compiled steps start from token ids; pass input_ids",
    "position_ids": "positions follow from attention_mask; left-pad the prompts and pass attention_mask",
    "assistant_tokenizer": "drafts must use the target's vocabulary; pass an assistant_model trained with it",
}

_IGNORED_SETTINGS = {
    "compile_config": "the model is compiled already",
    "prefill_chunk_size": "DCPConfig.prefill_chunk sets the size of prefill steps",
    "assistant_confidence_threshold": "DCPConfig.verify decides how much of a draft is verified",
    "num_assistant_tokens_schedule": "the draft length is num_assistant_tokens, or the engine's limit if that is less",
    "synced_gpus": "ranks are kept in step by the leader's decisions",
}

# Arguments of forward that transformers itself adds to every decoding call.
_EXPECTED_KWARGS = {"attention_mask", "position_ids", "use_cache", "logits_to_keep"}


def check_arguments(model: PreTrainedModel, arguments: Mapping[str, Any]) -> None:
    """Check the arguments of generate() as the caller gave them.

    Raises:
        GenerationError: one of them cannot be honoured.
    """
    if model.training:
        raise GenerationError("the model is in training mode; call model.eval() before generate()")
    if torch.is_autocast_enabled(model.device.type):
        raise GenerationError(
            f"torch.autocast is on for {model.device.type}: compiled steps compute in the dtype of the weights, {model.dtype}; "
            f"call generate() outside of it, or {UNOPTIMIZE}"
        )
    for name, reason in _REFUSED_ARGUMENTS.items():
        if arguments.get(name) is not None:
            raise GenerationError(f"{name} is not available on a compiled model: {reason}; or {UNOPTIMIZE}")
    if arguments.get("cache_implementation") == "paged":
        raise GenerationError(
            f"cache_implementation='paged' is transformers' own paged cache: leave it out, or {UNOPTIMIZE}"
        )
    input_ids = arguments.get("inputs") if arguments.get("inputs") is not None else arguments.get("input_ids")
    if input_ids is not None and (not isinstance(input_ids, Tensor) or input_ids.is_floating_point()):
        raise GenerationError(
            f"input_ids is a {_describe(input_ids)}; expected a tensor of token ids (return_tensors='pt')"
        )
    if input_ids is not None and (input_ids.dim() != 2 or 0 in input_ids.shape):
        raise GenerationError(f"input_ids has shape {list(input_ids.shape)}; expected [rows, columns] both at least 1")
    mask = arguments.get("attention_mask")
    if mask is not None and not isinstance(mask, Tensor):
        raise GenerationError(f"attention_mask is a {_describe(mask)}; expected a tensor (return_tensors='pt')")
    if input_ids is not None and mask is not None:
        _check_mask_shape(input_ids, mask)


def warn_ignored(arguments: Mapping[str, Any]) -> None:
    """Warn about settings of this call that have no effect."""
    config = arguments.get("generation_config")
    for name, reason in _IGNORED_SETTINGS.items():
        if arguments.get(name) or getattr(config, name, None):
            warnings.warn(f"{name} is ignored on a compiled model: {reason}", UserWarning, stacklevel=3)


def check_mode(mode: GenerationMode) -> None:
    """Raises GenerationError for anything but greedy search, sampling and drafting."""
    if mode not in SUPPORTED_MODES:
        raise GenerationError(
            f"generation mode {mode.value} is not available on a compiled model, which does greedy search and "
            f"sampling, with or without drafts: use {_MODE_SWITCHES.get(mode, 'another mode')}, or {UNOPTIMIZE}"
        )


def check_config(
    engine: Engine, mode: GenerationMode, config: GenerationConfig, mode_kwargs: Mapping[str, Any]
) -> None:
    """Check the merged generation config and the draft.

    Raises:
        GenerationError: a setting cannot be honoured.
    """
    check_mode(mode)
    assistant = mode_kwargs.get("assistant_model")
    acceptance = mode_kwargs.get("acceptance")
    refused = {
        "output_attentions": (config.output_attentions, "attention weights are never materialised; leave it out"),
        "output_hidden_states": (
            config.output_hidden_states,
            "hidden states stay inside the compiled step; leave it out",
        ),
        "use_cache": (config.use_cache is False, "decoding works on the paged cache; use_cache must not be False"),
        "cache_implementation": (
            config.cache_implementation not in (None, "dynamic"),
            f"'{config.cache_implementation}' is a transformers cache; leave it out",
        ),
        "guidance_scale": (config.guidance_scale not in (None, 1), "it needs a second model run per step; use 1"),
        "assistant_ensemble_weight": (
            config.assistant_ensemble_weight is not None,
            "it changes what is sampled, and acceptance here is lossless; leave it out",
        ),
        "assistant_early_exit": (config.assistant_early_exit is not None, "pass an assistant_model instead"),
        "use_mtp": (config.use_mtp, "pass an assistant_model instead"),
    }
    for name, (given, remedy) in refused.items():
        if given:
            raise GenerationError(f"{name} is not available on a compiled model: {remedy}; or {UNOPTIMIZE}")
    if mode is not GenerationMode.ASSISTED_GENERATION:
        if acceptance is not None:
            raise GenerationError(
                f"acceptance={acceptance!r} needs drafts: pass assistant_model or prompt_lookup_num_tokens"
            )
        return
    if acceptance is not None and acceptance not in RULES:
        raise GenerationError(f"acceptance={acceptance!r} is not one of {', '.join(map(repr, RULES))}")
    if engine.max_query_rows < 2:
        raise GenerationError(
            "the model was compiled without verify steps: optimize it with num_speculative_tokens of at least 1, or "
            "leave out assistant_model and prompt_lookup_num_tokens"
        )
    for name in ("num_assistant_tokens", "prompt_lookup_num_tokens", "max_matching_ngram_size"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise GenerationError(f"{name}={value} must be at least 1; leave out the draft to decode without one")
    if assistant is not None and config.prompt_lookup_num_tokens is not None:
        raise GenerationError(
            "assistant_model and prompt_lookup_num_tokens are two sources of drafts; pass one of them"
        )
    if assistant is not None:
        _check_assistant(engine, assistant)


def _check_assistant(engine: Engine, assistant: Any) -> None:
    name = type(assistant).__name__
    config = getattr(assistant, "config", None)
    if hasattr(config, "get_text_config"):
        vocab_size = getattr(config.get_text_config(decoder=True), "vocab_size", engine.vocab_size)
        if vocab_size != engine.vocab_size:
            raise GenerationError(
                f"assistant_model {name} has {vocab_size} tokens, the target {engine.vocab_size}: pass a draft trained "
                "with the target's vocabulary"
            )
    if getattr(assistant, "training", False):
        raise GenerationError(f"assistant_model {name} is in training mode; call its eval() before generate()")
    if is_dspark(assistant) or hasattr(assistant, "dcp_proposer"):
        return
    if not isinstance(assistant, PreTrainedModel) or not assistant.can_generate() or config.is_encoder_decoder:
        raise GenerationError(
            f"assistant_model {name} is neither a decoder-only causal LM nor an object with a dcp_proposer() method"
        )
    if not assistant._supports_default_dynamic_cache():
        raise GenerationError(f"assistant_model {name} does not work on a DynamicCache; pass a draft that does")


def check_processors(processors: LogitsProcessorList) -> None:
    """Raises GenerationError for processors that drafts would put out of step."""
    for processor in processors:
        if is_stateful(processor):
            raise GenerationError(
                f"{type(processor).__name__} keeps state from call to call, which rejected drafts would corrupt: "
                "generate without assistant_model and prompt_lookup_num_tokens"
            )


def check_model_kwargs(model_kwargs: Mapping[str, Any]) -> None:
    """Raises GenerationError for inputs of forward that the compiled steps do not take."""
    extra = sorted(name for name, value in model_kwargs.items() if value is not None and name not in _EXPECTED_KWARGS)
    if extra:
        raise GenerationError(
            f"{', '.join(extra)}: the compiled steps take only token ids and a mask; leave it out or {UNOPTIMIZE}"
        )


def split_prompts(input_ids: Tensor, mask: Tensor | None, vocab_size: int) -> tuple[list[Tensor], list[int]]:
    """Strip left padding.

    Args:
        input_ids: int64 ``[rows, columns]``.
        mask: ``[rows, columns]``, nonzero where a token is real; None if all are.
        vocab_size: ids must be below it.

    Returns:
        the rows without padding, and the padding columns per row.

    Raises:
        GenerationError: the mask is not one of left padding, a row is empty or an id is out of range; or token healing,
            which runs after the call's own mask was checked, made more or fewer columns of several prompts.
    """
    columns = input_ids.shape[1]
    if mask is not None and mask.shape != input_ids.shape:
        _check_no_padding(input_ids, mask)
        mask = None
    real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.to(input_ids.device) != 0
    lengths = real.sum(dim=1)
    left_padded = torch.arange(columns, device=input_ids.device) >= columns - lengths[:, None]
    wrong = (real != left_padded).any(dim=1).nonzero().flatten().tolist()
    if wrong:
        raise GenerationError(
            f"rows {wrong}: attention_mask is zero after a prompt's first token. Use padding_side='left'; if there is "
            "no padding and the prompt merely contains the pad token, pass attention_mask=torch.ones_like(input_ids)"
        )
    empty = (lengths == 0).nonzero().flatten().tolist()
    if empty:
        raise GenerationError(f"rows {empty}: the prompt is empty; give every row at least one token, such as bos")
    outside = input_ids[real & ((input_ids < 0) | (input_ids >= vocab_size))].tolist()
    if outside:
        raise GenerationError(f"input_ids contains {outside[0]}; token ids must be in [0, {vocab_size})")
    pads = [columns - length for length in lengths.tolist()]
    return [input_ids[row, pad:] for row, pad in enumerate(pads)], pads


def _describe(value: Any) -> str:
    return f"{value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__


def _check_mask_shape(input_ids: Tensor, mask: Tensor) -> None:
    if mask.shape != input_ids.shape:
        raise GenerationError(
            f"attention_mask has shape {list(mask.shape)}, input_ids {list(input_ids.shape)}: they must be equal"
        )


def _check_no_padding(healed_ids: Tensor, mask: Tensor) -> None:
    """GenerationError unless there is one unpadded prompt: none of the columns that token healing made is padding."""
    if len(healed_ids) > 1 or not mask.all():
        raise GenerationError(
            f"token_healing tokenised the prompts anew: {healed_ids.shape[1]} columns, of which an attention_mask of "
            f"{mask.shape[1]} no longer says which are padding; pass prompts without special tokens and without white "
            "space at their ends, or one unpadded prompt per call"
        )


def check_proposal(proposal: Proposal, limits: Sequence[int], vocab_size: int) -> None:
    """Raises GenerationError if a proposer broke its contract."""
    rows, width = proposal.tokens.shape
    counts = proposal.counts
    if proposal.tokens.dtype not in (torch.int32, torch.int64):
        raise GenerationError(f"the draft proposed tokens of type {proposal.tokens.dtype}; token ids are int64, or int32")
    if rows != len(limits) or len(counts) != rows:
        raise GenerationError(f"the draft proposed for {rows} rows (counts: {len(counts)}); there are {len(limits)}")
    if any(not 0 <= count <= min(limit, width) for count, limit in zip(counts, limits)):
        raise GenerationError(f"the draft proposed {counts} tokens ({width} columns); the limits are {list(limits)}")
    for tokens in (proposal.tokens[row, :count] for row, count in enumerate(counts) if count):
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            raise GenerationError(f"the draft proposed {tokens.tolist()}; token ids must be in [0, {vocab_size})")
    if proposal.confidences is not None and list(proposal.confidences.shape) != [rows, width]:
        raise GenerationError(
            f"the draft's confidences have shape {list(proposal.confidences.shape)}; expected {[rows, width]}"
        )
    if proposal.probs is not None and list(proposal.probs.shape) != [rows, width, vocab_size]:
        raise GenerationError(
            f"the draft's probabilities have shape {list(proposal.probs.shape)}; expected {[rows, width, vocab_size]}"
        )
