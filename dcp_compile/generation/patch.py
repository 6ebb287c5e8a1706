# SPDX-License-Identifier: Apache-2.0
"""Put an engine behind a model's generate(), and take it away again.

The model's class becomes a subclass of itself with the same name whose decoding methods run on the engine; transformers
looks these up on the class. Everything before them (configs, masks, processors, criteria) and the plain forward call
stay transformers' own.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMixin, GenerationMode

from ..drafting import is_dspark, prepare_draft
from ..errors import GenerationError, UnsupportedModelError
from ..places import Places
from . import validate
from .ahead import decode_ahead, why_wait
from .call import HeldStreamer, prepare
from .drafts import CausalLMProposer, PromptLookup, Proposer
from .dspark import DSparkProposer
from .interface import Engine
from .loop import decode_plain, decode_speculative
from .schedule import ByAcceptanceRate, ByConfidence, Schedule, WholeDrafts

ENGINE = "_dcp_engine"
_PLACES = "_dcp_places"
_LOCK = "_dcp_lock"
_DEFAULT_NGRAM = 2  # transformers' own


def attach(model: PreTrainedModel, engine: Engine) -> None:
    """Make ``model.generate()`` decode on ``engine``.

    Raises:
        UnsupportedModelError: the model cannot generate, has an engine, or replaces a generation method on the
        instance.
    """
    name = type(model).__name__
    if is_attached(model):
        raise UnsupportedModelError(f"{name} is optimised already; call dcp_compile.unoptimize(model) first")
    if not isinstance(model, GenerationMixin):
        raise UnsupportedModelError(f"{name} has no generate(); load it with AutoModelForCausalLM")
    replaced = sorted(set(vars(model)) & {"generate", *vars(DcpGenerateMixin)} - {"__module__", "__doc__"})
    if replaced:
        raise UnsupportedModelError(
            f"{name} has its own {', '.join(replaced)} on the instance (a custom_generate repository does this), which "
            "would bypass the compiled loop; load the model without it"
        )
    vars(model)[ENGINE] = engine  # past nn.Module.__setattr__: an engine is no submodule
    vars(model)[_PLACES] = Places(model)
    vars(model)[_LOCK] = threading.RLock()
    model.__class__ = _subclass(type(model))


def detach(model: PreTrainedModel) -> None:
    """Undo :func:`attach`: the model's class and attributes are again what they were.

    Raises:
        UnsupportedModelError: the model has no engine.
    """
    if not is_attached(model):
        raise UnsupportedModelError(f"{type(model).__name__} is not optimised; nothing to undo")
    model.__class__ = type(model).__mro__[2]
    for name in (ENGINE, _PLACES, _LOCK):
        del vars(model)[name]


def is_attached(model: Any) -> bool:
    return isinstance(model, DcpGenerateMixin)


class DcpGenerateMixin:
    """The decoding methods of a compiled model; transformers' generate() calls them."""

    _is_stateful = False  # stands for "cannot roll back"; a session's verify and commit can
    _supported_generation_modes = validate.SUPPORTED_MODES

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: HeldStreamer | None = None,
        tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        engine = vars(self)[ENGINE]
        call = prepare(
            input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs, engine.vocab_size
        )
        with engine.open(len(call.prompts), call.row_length, call.given) as session:
            return decode_plain(session, call)

    def _assisted_decoding(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: HeldStreamer | None = None,
        tokenizer: Any = None,
        assistant_model: Any = None,
        acceptance: str | None = None,
        **model_kwargs: Any,
    ) -> Any:
        call = prepare(
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            streamer,
            model_kwargs,
            vars(self)[ENGINE].vocab_size,
        )
        validate.check_processors(call.processors)
        engine = vars(self)[ENGINE]
        if is_dspark(assistant_model) and engine.parallel.replica is None:  # ranks compare what they were given first
            engine.check_room(len(call.prompts), call.row_length)  # the draft may have to be compiled for this call
        make_proposer = _proposer(self, generation_config, assistant_model)
        engine = vars(self)[ENGINE]  # perhaps another than before
        width = _draft_width(engine, generation_config, assistant_model)
        acceptance = acceptance or "standard"
        given = {
            "draft": type(assistant_model).__name__,
            "draft tokens per step": width,
            "acceptance": acceptance,
            "processors that read tokens": not call.ragged,
        }
        with engine.open(len(call.prompts), call.row_length, lambda: call.given() | given) as session:
            proposer = make_proposer()
            try:
                arguments = session, call, proposer, width, acceptance
                if isinstance(proposer, DSparkProposer) and why_wait(engine, proposer.engine, call) is None:
                    return decode_ahead(*arguments)
                return decode_speculative(*arguments, _schedule(self, width, assistant_model))
            finally:
                proposer.close()

    def _extract_generation_mode_kwargs(
        self, custom_generate: Any, kwargs: dict[str, Any], *rest: Any
    ) -> dict[str, Any]:
        acceptance = kwargs.pop("acceptance", None)
        mode_kwargs = super()._extract_generation_mode_kwargs(custom_generate, kwargs, *rest)
        return mode_kwargs if acceptance is None else {**mode_kwargs, "acceptance": acceptance}

    def _get_deprecated_gen_repo(self, generation_mode: GenerationMode, *rest: Any) -> None:
        # transformers asks for trust_remote_code here, before it validates the mode.
        validate.check_mode(generation_mode)

    def _validate_generation_mode(
        self,
        generation_mode: GenerationMode,
        generation_config: GenerationConfig,
        generation_mode_kwargs: dict[str, Any],
    ) -> None:
        validate.check_config(vars(self)[ENGINE], generation_mode, generation_config, generation_mode_kwargs)

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """The engine owns the pages: no transformers cache is made."""

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def generate_batch(self, *args: Any, **kwargs: Any) -> None:
        raise GenerationError(
            "generate_batch() is transformers' continuous batching on its own paged cache: call generate() with a "
            f"left-padded batch, or {validate.UNOPTIMIZE}"
        )

    init_continuous_batching = generate_batch

    def __deepcopy__(self, memo: dict) -> None:
        raise UnsupportedModelError(
            "a compiled model owns pages and captured graphs and cannot be copied; call dcp_compile.unoptimize(model) "
            "first"
        )

    def __reduce_ex__(self, protocol: int) -> tuple:
        """Pickles hold the plain model: optimise it again after loading."""
        state = {name: value for name, value in vars(self).items() if not name.startswith("_dcp")}
        return object.__new__, (type(self).__mro__[2],), state


@functools.cache
def _subclass(base: type) -> type:
    """The class of compiled models that were a ``base``; its method resolution order is [itself, mixin, base, ...]."""
    signature = inspect.signature(base.generate)
    extra = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)

    @functools.wraps(base.generate)
    def generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        named, keywords = bound.arguments, bound.arguments.get(extra, {})
        arguments = {**named, **keywords}
        validate.check_arguments(self, arguments)
        vars(self)[_PLACES].check(self)
        validate.warn_ignored(arguments)
        if arguments.get("streamer") is not None:
            holder = keywords if "streamer" in keywords else named
            holder["streamer"] = HeldStreamer(arguments["streamer"])
        # One call at a time: an engine's graphs have one set of buffers. And Triton launches on the current device.
        with vars(self)[_LOCK], torch.accelerator.device_index(self.device.index):
            return base.generate(*bound.args, **bound.kwargs)

    namespace = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (DcpGenerateMixin, base), {**namespace, "generate": generate})


def _proposer(model: Any, config: GenerationConfig, assistant: Any) -> Callable[[], Proposer]:
    """Makes the proposer of one call. A DSpark draft is compiled here, which may give the model another engine."""
    if assistant is None:
        return lambda: PromptLookup(config.max_matching_ngram_size or _DEFAULT_NGRAM)
    if is_dspark(assistant):
        engine = prepare_draft(model, assistant)
        return lambda: DSparkProposer(engine)
    return assistant.dcp_proposer if hasattr(assistant, "dcp_proposer") else lambda: CausalLMProposer(assistant)


def _schedule(model: Any, width: int, assistant: Any) -> Schedule:
    """How much of the drafts is verified, by DCPConfig.verify."""
    costs = vars(model)[ENGINE].verify_costs
    if costs is None:
        return WholeDrafts()
    if not is_dspark(assistant):
        return ByAcceptanceRate(width, costs)
    draft = model._dcp.draft
    return ByConfidence(costs, draft.costs) if draft.gives_confidence else ByAcceptanceRate(width, costs, draft.costs)


def _draft_width(engine: Engine, config: GenerationConfig, assistant: Any) -> int:
    """Draft tokens per step: the least of the engine's limit and what the call and the draft's own config ask for."""
    own = getattr(getattr(assistant, "generation_config", None), "num_assistant_tokens", None)
    asked = (config.num_assistant_tokens, config.prompt_lookup_num_tokens, own)
    return min([engine.max_query_rows - 1, *(count for count in asked if count is not None)])
