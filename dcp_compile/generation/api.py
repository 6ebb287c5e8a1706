# SPDX-License-Identifier: Apache-2.0
"""The function form of generate()."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from .patch import is_attached


def generate(
    model: PreTrainedModel,
    inputs: Any = None,
    *,
    assistant_model: Any = None,
    streamer: Any = None,
    acceptance: str | None = None,
    **kwargs: Any,
) -> Any:
    """``model.generate(...)`` of a compiled model, spelled as a function.

    Args:
        model: a model returned by ``optimize()``.
        inputs: prompt token ids, int64 ``[rows, columns]``, left padded.
        assistant_model: a source of drafts: a DSpark draft for this model, which is compiled at its first call; a causal LM
            of the same vocabulary; or an object with ``dcp_proposer()``.
        streamer: receives the prompt and then each column of tokens, on the leader only; on other ranks it is only ended.
        acceptance: "standard" (default) or "block", how drafts are accepted when sampling; both are lossless.
        kwargs: everything else ``model.generate()`` takes.

    Returns:
        Prompts and new tokens, int64 ``[rows, columns]``; with ``return_dict_in_generate`` a GenerateDecoderOnlyOutput.

    Raises:
        UnsupportedModelError: the model is not compiled, or tensors of it or of the draft were replaced since.
        GenerationError: an argument cannot be honoured.
        CapacityError: prompts and new tokens do not fit.
        ConfigError, CaptureError, MatchError, BackendError: the draft does not fit the model, or cannot be compiled.
        RankError: the ranks were asked for different things, or one does not answer.
    """
    if not is_attached(model):
        raise UnsupportedModelError(f"{type(model).__name__} is not optimised; call dcp_compile.optimize(model) first")
    options = {"assistant_model": assistant_model, "streamer": streamer, **kwargs}
    if acceptance is not None:
        options["acceptance"] = acceptance
    return type(model).generate(model, inputs, **options)
