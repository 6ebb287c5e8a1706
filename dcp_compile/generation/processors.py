# SPDX-License-Identifier: Apache-2.0
"""Which logits processors can run where.

A processor that reads only the scores can take any rows at once. Any other needs the whole batch at one length, because
it may tell rows apart by their index.
"""

from __future__ import annotations

from collections.abc import Callable

import transformers

_CONTEXT_FREE = (
    transformers.EpsilonLogitsWarper,
    transformers.EtaLogitsWarper,
    transformers.InfNanRemoveLogitsProcessor,
    transformers.LogitNormalization,
    transformers.MinPLogitsWarper,
    transformers.SuppressTokensLogitsProcessor,
    transformers.TemperatureLogitsWarper,
    transformers.TopHLogitsWarper,
    transformers.TopKLogitsWarper,
    transformers.TopPLogitsWarper,
    transformers.TypicalLogitsWarper,
)
_STATEFUL = (
    transformers.ClassifierFreeGuidanceLogitsProcessor,
    transformers.SynthIDTextWatermarkLogitsProcessor,
    transformers.UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


def is_context_free(processor: Callable) -> bool:
    """True if the processor reads the scores only. A subclass may read more, so the type must be exact."""
    return type(processor) in _CONTEXT_FREE


def is_stateful(processor: Callable) -> bool:
    """True if calling the processor for a draft token changes what it does later."""
    return isinstance(processor, _STATEFUL)
