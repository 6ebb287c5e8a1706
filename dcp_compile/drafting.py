# SPDX-License-Identifier: Apache-2.0
"""Bringing a DSpark draft together with an optimised target."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from .compiler import compile_draft, compile_model
from .errors import ConfigError, UnsupportedModelError
from .parallel import ParallelLayout
from .parallel.agreement import check_agreement, config_facts
from .parallel.shard import shard_of, take_part, weights_facts
from .runtime.draft import DraftEngine


def is_dspark(assistant: object) -> bool:
    """Whether an assistant model is a DSpark draft: it projects target states and proposes blocks of mask tokens."""
    return hasattr(assistant, "project_context") and hasattr(assistant, "markov_bias")


def tap_layers(model: PreTrainedModel, draft: PreTrainedModel, max_seq_len: int) -> tuple[int, ...]:
    """Target layers whose hidden states the draft reads.

    Raises:
        ConfigError: the draft was made for another target or for fewer than ``max_seq_len`` tokens, or is of another type
            or on another device.
        UnsupportedModelError: the draft is in training mode, or the target does not give hidden states of its layers.
    """
    if draft.training:
        raise UnsupportedModelError(f"{type(draft).__name__} is in training mode; call draft.eval() first")
    draft.config.check_target(model.config)
    _check_weights(model, draft)
    width = model.get_input_embeddings().weight.shape[1]
    if draft.config.hidden_size != width:
        raise ConfigError(
            f"the draft has hidden_size={draft.config.hidden_size}, but the target's embeddings, which it shares, are {width} "
            "wide; use the draft that was trained for this target"
        )
    if draft.config.max_position_embeddings < max_seq_len:
        raise ConfigError(
            f"max_seq_len={max_seq_len}, but the draft was made for max_position_embeddings="
            f"{draft.config.max_position_embeddings}; call optimize() with a max_seq_len of at most that to generate with it"
        )
    if "tap_layers" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError(
            f"{type(model).__name__} gives no hidden states of its layers (forward() has no tap_layers), which a DSpark draft "
            "reads; draft with another language model, or prompt_lookup_num_tokens"
        )
    return tuple(draft.config.target_layer_ids)


def _check_weights(model: PreTrainedModel, draft: PreTrainedModel) -> None:
    if draft.dtype != model.dtype:
        raise ConfigError(
            f"the draft's weights are {draft.dtype}, the target's {model.dtype}; load the draft with dtype={model.dtype}"
        )
    if draft.device != model.device:
        raise ConfigError(f"the draft is on {draft.device}, the target on {model.device}; load the draft there")


def of_draft(facts: dict[str, object]) -> dict[str, object]:
    """Facts that ranks compare, named as those of the draft."""
    return {f"draft's {name}": value for name, value in facts.items()}


@torch.inference_mode(False)  # as optimize()
def prepare_draft(model: PreTrainedModel, draft: PreTrainedModel) -> DraftEngine:
    """The compiled form of ``draft`` for the optimised ``model``; compiled once and kept on the model.

    When the target was compiled without the draft's taps it is compiled again with them. Nothing changes if that, or
    compiling the draft, fails.

    Raises:
        ConfigError, UnsupportedModelError: the draft does not fit the target.
        CaptureError, MatchError, BackendError: the draft cannot be compiled.
    """
    optimized = model.__dict__["_dcp"]
    if optimized.draft is not None and optimized.draft.model is draft:
        _check_weights(model, draft)
        optimized.draft.places.check(draft)
        return optimized.draft
    if not optimized.config.num_speculative_tokens:
        raise ConfigError("num_speculative_tokens=0: call optimize() with at least 1 to generate with a draft")
    taps = tap_layers(model, draft, optimized.config.max_seq_len)
    check_agreement(optimized.parallel.replica, of_draft(config_facts(draft) | weights_facts(draft)))
    engine, report = model._dcp_engine, optimized.report
    if engine.tap_layers != taps:
        engine, report = compile_model(model, optimized.config, optimized.parallel, taps)
    restore = _take_part(draft, optimized.parallel, optimized.config.query_projection)
    try:
        compiled = compile_draft(draft, model, engine)
    except BaseException:
        restore()
        raise
    optimized.restore_draft()  # of the draft before this one
    model.__dict__["_dcp_engine"], optimized.report = engine, report
    optimized.draft, optimized.draft_report = compiled
    optimized.restore_draft = restore
    return optimized.draft


def _take_part(draft: PreTrainedModel, parallel: ParallelLayout, query_projection: str) -> Callable[[], None]:
    """Split the draft as its target is split; a draft whose class has no plan stays whole on every rank."""
    if shard_of(draft) is None and getattr(type(draft), "sharding_plan", None) is None:
        return lambda: None
    return take_part(draft, parallel, False, query_projection)
