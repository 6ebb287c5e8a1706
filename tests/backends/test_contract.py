# SPDX-License-Identifier: Apache-2.0
"""What a backend must declare, and the reason each unmet requirement gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from dcp_compile.backends import AttentionRequirements, BackendCapabilities, rejections
from tests.backends.capabilities import ABLE, NEED, able


def test_an_able_backend_has_no_reason_against_it() -> None:
    assert rejections(able(), NEED) == []


@pytest.mark.parametrize("name", ABLE)
def test_nothing_can_be_left_undeclared(name: str) -> None:
    assert {field.name for field in dataclasses.fields(BackendCapabilities)} == set(ABLE)
    with pytest.raises(TypeError, match=name):
        BackendCapabilities(**{key: value for key, value in ABLE.items() if key != name})


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(AttentionRequirements)])
def test_nothing_can_be_left_unasked(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        AttentionRequirements(**{key: value for key, value in dataclasses.asdict(NEED).items() if key != name})


@pytest.mark.parametrize("base", [10.0, 0.0, 2.718281828])
def test_the_logarithm_has_base_two_or_e(base: float) -> None:
    assert able(lse_base=2.0)
    with pytest.raises(ValueError, match=f"lse_base={base}"):
        able(lse_base=base)


@pytest.mark.parametrize("layouts", [(), ("paged",), ("split", "paged")])
def test_layouts_are_known_ones(layouts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="layouts="):
        able(layouts=layouts)


REJECTED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"device_types": frozenset({"cpu"})}, {}, "device type cuda not supported (supported: cpu)"),
    ({"compute_capabilities": frozenset({(10, 0), (12, 0)})}, {},
     "compute capability (9, 0) not supported (supported: (10, 0), (12, 0))"),
    ({"compute_capabilities": frozenset({(9, 0)})}, {"compute_capability": None},
     "compute capability None not supported (supported: (9, 0))"),
    ({"query_dtypes": frozenset({torch.float16})}, {},
     "query dtype torch.bfloat16 not supported (supported: torch.float16)"),
    ({"kv_dtypes": frozenset({torch.float8_e4m3fn})}, {},
     "kv cache dtype torch.bfloat16 not supported (supported: torch.float8_e4m3fn)"),
    ({"latent_dims": frozenset({512})}, {}, "latent dim 48 not supported (supported: 512)"),
    ({"rope_dims": frozenset({64})}, {}, "rope dim 24 not supported (supported: 64)"),
    ({"head_counts": frozenset({16, 128})}, {}, "head count 6 not supported (supported: 128, 16)"),
    ({"page_sizes": frozenset({64})}, {}, "page size 32 not supported (supported: 64)"),
    ({"layouts": ("flattened",)}, {}, "decode layout split not supported (supported: flattened)"),
    ({"returns_lse": False}, {}, "does not return the log-sum-exp that merging partial attention needs"),
    ({"causal_multi_token_dcp": False}, {}, "causal multi-token queries on a sharded cache not supported"),
    ({"non_causal_multi_token_dcp": False}, {"causal": False},
     "non-causal multi-token queries on a sharded cache not supported"),
    ({"varlen_dcp": False}, {}, "different query lengths per request on a sharded cache not supported"),
    ({"interleave_above_one": False}, {}, "kv_interleave 2 not supported (only 1)"),
    ({"graph_safe_without_planning": False}, {},
     "reads lengths on the host and has no plan call: a CUDA graph would replay those of its capture"),
    ({"max_query_rows": 4}, {}, "5 query rows per request not supported (at most 4)"),
]  # fmt: skip


@pytest.mark.parametrize("have, need, reason", REJECTED, ids=["-".join([*h, *n]) for h, n, _ in REJECTED])
def test_one_missing_capability_is_one_reason(have: dict, need: dict, reason: str) -> None:
    assert rejections(able(**have), dataclasses.replace(NEED, **need)) == [reason]


def test_every_capability_can_reject() -> None:
    assert {name for have, _, _ in REJECTED for name in have} | {"lse_base"} == set(ABLE)


def test_all_reasons_are_given_at_once() -> None:
    reasons = rejections(able(returns_lse=False, latent_dims=frozenset({512}), max_query_rows=1), NEED)
    assert len(reasons) == 3


@pytest.mark.parametrize("missing", ["causal_multi_token_dcp", "varlen_dcp", "interleave_above_one"])
def test_an_unsharded_cache_needs_no_sharded_capability(missing: str) -> None:
    assert rejections(able(**{missing: False}), dataclasses.replace(NEED, dcp_size=1)) == []


@pytest.mark.parametrize("missing, need", [
    ("causal_multi_token_dcp", {"query_rows": 1}),
    ("causal_multi_token_dcp", {"causal": False}),
    ("non_causal_multi_token_dcp", {}),
    ("non_causal_multi_token_dcp", {"causal": False, "query_rows": 1}),
    ("varlen_dcp", {"ragged": False}),
    ("interleave_above_one", {"interleave": 1}),
    ("graph_safe_without_planning", {"cuda_graphs": False}),
])  # fmt: skip
def test_a_capability_that_is_not_needed_does_not_reject(missing: str, need: dict) -> None:
    assert rejections(able(**{missing: False}), dataclasses.replace(NEED, **need)) == []


def test_a_plan_is_as_good_for_a_cuda_graph_as_reading_on_the_device() -> None:
    assert rejections(able(graph_safe_without_planning=False), NEED, plans=True) == []
    assert rejections(able(graph_safe_without_planning=False, returns_lse=False), NEED, plans=True) == [
        "does not return the log-sum-exp that merging partial attention needs"
    ]


@pytest.mark.parametrize("supported, listed", [({1, 2, 3, 4}, "1 to 4"), ({1, 2, 4}, "1, 2, 4"), ({64, 65}, "64, 65")])
def test_what_is_supported_is_listed_shortly(supported: set[int], listed: str) -> None:
    (reason,) = rejections(able(head_counts=frozenset(supported)), NEED)
    assert reason == f"head count 6 not supported (supported: {listed})"


def test_exactly_as_many_rows_as_possible_are_fine() -> None:
    assert rejections(able(max_query_rows=5), NEED) == []


def test_any_layout_will_do_for_auto() -> None:
    assert rejections(able(layouts=("flattened",)), dataclasses.replace(NEED, layout="auto")) == []
