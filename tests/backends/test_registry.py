# SPDX-License-Identifier: Apache-2.0
"""Registration, order of preference, and the reasons that a choice or an error carries."""

from __future__ import annotations

import dataclasses

import pytest

from dcp_compile import backends
from dcp_compile.backends import get_backend, register_backend, registry, select_backend
from dcp_compile.errors import BackendError
from tests.backends.capabilities import NEED, MadeUp


@pytest.fixture(autouse=True)
def no_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BACKENDS", {})


def test_the_first_able_backend_is_taken_and_the_others_before_it_explained() -> None:
    register_backend(MadeUp("absent", missing="its library is not installed"))
    register_backend(MadeUp("narrow", latent_dims=frozenset({512}), returns_lse=False))
    register_backend(MadeUp("first"))
    register_backend(MadeUp("second"))
    choice = select_backend(NEED)
    assert choice.name == "first"
    assert choice.rejected == {
        "absent": ["its library is not installed"],
        "narrow": [
            "latent dim 48 not supported (supported: 512)",
            "does not return the log-sum-exp that merging partial attention needs",
        ],
    }


def test_a_named_backend_is_taken_whatever_comes_before_it() -> None:
    register_backend(MadeUp("first"))
    register_backend(MadeUp("second"))
    choice = select_backend(NEED, "second")
    assert (choice.name, choice.rejected) == ("second", {})


def test_a_named_backend_that_cannot_serve_is_an_error_even_if_others_can() -> None:
    register_backend(MadeUp("first"))
    register_backend(MadeUp("second", missing="no CUDA device", page_sizes=frozenset({64})))
    with pytest.raises(BackendError) as caught:
        select_backend(NEED, "second")
    assert "second: no CUDA device, page size 32 not supported (supported: 64)" in str(caught.value)
    assert 'backend="auto"' in str(caught.value) and "first" not in str(caught.value)


def test_every_reason_is_listed_when_nothing_can_serve() -> None:
    register_backend(MadeUp("first", max_query_rows=1))
    register_backend(MadeUp("second", missing="no CUDA device"))
    with pytest.raises(BackendError) as caught:
        select_backend(NEED)
    assert "first: 5 query rows per request not supported (at most 1); second: no CUDA device" in str(caught.value)


def test_no_backend_at_all() -> None:
    with pytest.raises(BackendError, match="no attention backend"):
        select_backend(NEED)


@pytest.mark.parametrize("find", [get_backend, lambda name: select_backend(NEED, name)])
def test_an_unknown_name_lists_the_known_ones(find) -> None:
    register_backend(MadeUp("first"))
    register_backend(MadeUp("second"))
    with pytest.raises(BackendError, match="unknown attention backend 'third'; known backends: first, second"):
        find("third")


def test_a_name_is_registered_once() -> None:
    mine = MadeUp("mine")
    register_backend(mine)
    with pytest.raises(BackendError, match="'mine' is registered already"):
        register_backend(MadeUp("mine"))
    assert get_backend("mine") is mine


@pytest.mark.parametrize("declared", [None, {"returns_lse": True}, object])
def test_a_backend_without_capabilities_cannot_be_registered(declared: object) -> None:
    careless = MadeUp("careless")
    careless.capabilities = declared
    with pytest.raises(BackendError, match="declares no BackendCapabilities"):
        register_backend(careless)
    with pytest.raises(BackendError, match="unknown"):
        get_backend("careless")


@pytest.mark.parametrize("call", ["unavailable", "attend_rows", "attend_prefix", "attend_tail"])
def test_a_backend_without_one_of_its_calls_cannot_be_registered(call: str) -> None:
    careless = MadeUp("careless")
    setattr(careless, call, None)
    with pytest.raises(BackendError, match=call):
        register_backend(careless)


def test_a_backend_that_plans_serves_cuda_graphs_and_does_not_declare_to_need_no_plan() -> None:
    planner = MadeUp("planner", graph_safe_without_planning=False)
    planner.plan = lambda *given: None
    register_backend(planner)
    register_backend(MadeUp("reader", graph_safe_without_planning=False))
    assert select_backend(NEED).name == "planner"
    with pytest.raises(BackendError, match="reader: reads lengths on the host and has no plan call"):
        select_backend(NEED, "reader")
    confused = MadeUp("confused")
    confused.plan = planner.plan
    with pytest.raises(BackendError, match="'confused' has a plan call but declares graph_safe_without_planning=True"):
        register_backend(confused)


def test_auto_is_not_a_name() -> None:
    with pytest.raises(BackendError, match="auto"):
        register_backend(MadeUp("auto"))


def test_a_choice_is_a_fact() -> None:
    register_backend(MadeUp("first"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        select_backend(NEED).name = "second"
    assert backends.BackendChoice is registry.BackendChoice
