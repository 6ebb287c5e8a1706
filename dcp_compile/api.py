# SPDX-License-Identifier: Apache-2.0
"""optimize() and unoptimize()."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .compiler import CompileReport, compile_model
from .config import DCPConfig, check_experts_dealt
from .drafting import is_dspark, of_draft, prepare_draft, tap_layers
from .errors import ConfigError, UnsupportedModelError
from .generation.patch import attach, detach
from .parallel import ParallelLayout, parallel_layout
from .parallel.agreement import check_agreement, config_facts
from .parallel.shard import shard_of, take_part, weights_facts
from .runtime.draft import DraftEngine


@dataclass
class Optimized:
    """What optimize() left on a model; the draft's share is filled when a draft is compiled.

    Attributes:
        restore, restore_draft: bring back the weights as they were before.
    """

    config: DCPConfig
    parallel: ParallelLayout
    report: CompileReport
    restore: Callable[[], None]
    draft: DraftEngine | None = None
    draft_report: CompileReport | None = None
    restore_draft: Callable[[], None] = lambda: None


@torch.inference_mode(False)  # caches made in inference mode could not be written outside it
def optimize(
    model: PreTrainedModel,
    dcp_size: int | None = None,
    backend: str = "auto",
    config: DCPConfig | None = None,
    draft: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """Compile the decode path of ``model`` and route its ``generate()`` through it.

    The model is traced, its MLA attention rewritten to run in the latent space over a paged cache sharded by token over
    ``dcp_size`` ranks, and its class replaced by a subclass whose generate() uses the result. forward() is untouched.
    Under torchrun every rank calls this with the same model and settings.

    Args:
        model: a Hugging Face causal LM with multi-head latent attention, in eval mode on one device.
        dcp_size: ranks of the DCP group; None = config's, else all tensor-parallel ranks, else 1.
        backend: attention backend, or "auto".
        config: all other settings.
        draft: a DSpark draft to compile now; otherwise that happens in the first generate(assistant_model=draft).

    Returns:
        The same object.

    Raises:
        UnsupportedModelError, CaptureError, MatchError: the model cannot be optimised; it is unchanged.
        ConfigError, BackendError, CapacityError: the settings cannot be met; the model is unchanged.
        RankError: the ranks hold different models or settings.

    Weights keep their values whatever happens; some may lie elsewhere in memory once everything has been compiled.
    """
    settings = DCPConfig() if config is None else config
    if not isinstance(settings, DCPConfig):
        raise ConfigError(f"config={settings!r} must be a DCPConfig, such as dcp_compile.DCPConfig(block_size=64)")
    if dcp_size is not None:
        settings = settings.replace(dcp_size=dcp_size)
    if backend != "auto":
        settings = settings.replace(backend=backend)
    _check_model(model)
    if draft is not None and not is_dspark(draft):
        raise ConfigError(
            f"draft is a {type(draft).__name__}, not a DSpark draft, which is what optimize() compiles; pass another language "
            "model to generate() as assistant_model"
        )
    settings = _settings_of_part(model, settings)
    with torch.accelerator.device_index(model.device.index):  # Triton launches, and streams are made, on the current device
        _optimize(model, settings, draft)
    return model


def _optimize(model: PreTrainedModel, settings: DCPConfig, draft: PreTrainedModel | None) -> None:
    parallel = parallel_layout(settings, next(model.parameters()).device)
    facts = {f"config.{name}": value for name, value in dataclasses.asdict(settings).items()}
    facts |= {"device type": next(model.parameters()).device.type, "draft": None if draft is None else "given"}
    facts |= config_facts(model) | weights_facts(model)
    if draft is not None:
        facts |= of_draft(config_facts(draft))
    check_agreement(parallel.replica, facts)

    restore = take_part(model, parallel, settings.expert_parallel, settings.query_projection)
    try:
        taps = tap_layers(model, draft, settings.max_seq_len) if draft is not None else ()
        engine, report = compile_model(model, settings, parallel, taps)
        attach(model, engine)
    except BaseException:
        restore()
        raise
    model._dcp = Optimized(settings, parallel, report, restore)
    if draft is not None:
        try:
            prepare_draft(model, draft)
        except BaseException:
            unoptimize(model)
            raise


def unoptimize(model: PreTrainedModel) -> PreTrainedModel:
    """Undo :func:`optimize`: class, generate() and weights are what they were. Returns the same object.

    Raises:
        UnsupportedModelError: the model is not optimised.
    """
    optimized = model.__dict__.pop("_dcp", None)
    if optimized is None:
        raise UnsupportedModelError(f"{type(model).__name__} is not optimised; there is nothing to undo")
    detach(model)
    optimized.restore_draft()
    optimized.restore()
    return model


def _settings_of_part(model: PreTrainedModel, settings: DCPConfig) -> DCPConfig:
    """The settings, with those that a model loaded in parts has decided already."""
    shard = shard_of(model)
    if shard is None:
        check_experts_dealt(settings)
        return settings
    loaded = {
        "tp_size": shard.tp_size,
        "expert_parallel": shard.expert_parallel,
        "query_projection": "replicated" if shard.query_ranks > 1 else "sharded",
    }
    if shard.query_ranks > 1:
        loaded["dcp_size"] = shard.query_ranks
    defaults = DCPConfig()
    for name, value in loaded.items():
        asked = getattr(settings, name)
        if asked not in (getattr(defaults, name), value):
            everything = ", ".join(f"{name}={value!r}" for name, value in loaded.items())
            raise ConfigError(
                f"{name}={asked!r}, but {type(model).__name__} was loaded with {everything}; leave it out, or load it "
                "with another"
            )
    return settings.replace(**loaded)


def _check_model(model: PreTrainedModel) -> None:
    if not isinstance(model, PreTrainedModel) or not hasattr(model, "generate"):
        raise UnsupportedModelError(f"{type(model).__name__} is not a transformers model with generate()")
    if "_dcp" in model.__dict__:
        raise UnsupportedModelError(f"{type(model).__name__} is optimised already; call unoptimize() first")
    if model.training:
        raise UnsupportedModelError(f"{type(model).__name__} is in training mode; call model.eval() first")
    if any(isinstance(parameter.data, DTensor) for parameter in model.parameters()):
        raise UnsupportedModelError(
            f"{type(model).__name__} was split by transformers (tp_plan): load it without, whole on every rank, or a Kimi-K3 with "
            "tp_size"
        )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) != 1 or devices == ["meta"]:
        raise UnsupportedModelError(
            f"{type(model).__name__} lies on {', '.join(devices)}; load it whole on one real device per rank "
            "(no device_map over several devices)"
        )
    if torch.is_autocast_enabled(model.device.type):
        raise UnsupportedModelError(
            f"torch.autocast is on for {model.device.type}: compiled steps compute in the dtype of the weights, {model.dtype}; "
            "call optimize() outside of it, on a model loaded with the dtype you want"
        )
