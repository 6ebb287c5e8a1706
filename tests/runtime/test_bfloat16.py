# SPDX-License-Identifier: Apache-2.0
"""A bfloat16 model on an engine is as close to its own float32 as it is in transformers."""

from __future__ import annotations

import copy

import pytest
import torch

from dcp_compile.runtime import Engine
from tests.runtime.reference import MODELS, Captured, capture
from tests.tiny_models import VOCAB

# Dense layers only: a rounding that changes the choice of experts would say nothing about the engine.
DENSE = {
    "kimi_k3": {"layers": 3, "first_k_dense_replace": 3},
    "kimi_linear": {"layers": 2, "mlp_layer_types": ["dense"] * 2},
    "deepseek_v3": {"layers": 2, "first_k_dense_replace": 2},
}


@pytest.mark.parametrize("name", MODELS)
def test_as_close_to_float32_as_transformers(name: str) -> None:
    model = MODELS[name](dtype=torch.bfloat16, **DENSE[name])
    assert model.dtype == torch.bfloat16 and not any("expert" in key for key in model.state_dict())
    ids = torch.randint(3, VOCAB, (1, 60), generator=torch.Generator().manual_seed(17))
    with torch.no_grad():
        exact = copy.deepcopy(model).float()(ids).logits[0]
        theirs = model(ids).logits[0].float()

    def error(logits: torch.Tensor) -> float:
        return float((logits[29:] - exact[29:]).square().mean().sqrt())

    assert 1e-4 < error(theirs) < 0.1  # it is bfloat16 that is compared
    step = Captured(model, capture(model))
    for layout in ("split", "flattened"):
        engine = step.engine(num_speculative_tokens=4, decode_layout=layout, prefill_chunk=16)
        assert {state.dtype for ref, state in engine.states.items() if ref.kind == "kv_cache"} == {torch.bfloat16}
        assert {state.dtype for ref, state in engine.states.items() if ref.kind == "state"} <= {torch.float32}
        assert error(_decode(engine, ids)) < 1.5 * error(theirs)


def _decode(engine: Engine, ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[60, vocab]`` from row 29 on: by prefill, then by single tokens, then by verify steps."""
    logits = torch.empty(60, engine.vocab_size)
    with engine.open(1, 60) as session:
        logits[29] = session.prefill([ids[0, :30]])[0]
        for at in range(30, 40):
            logits[at] = session.decode(ids[0, at : at + 1], [True])[0]
        for at in range(40, 60, 5):
            logits[at : at + 5] = session.verify(ids[:, at : at + 5], [5])[0]
            session.commit([5])
    return logits
