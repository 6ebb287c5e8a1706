# SPDX-License-Identifier: Apache-2.0
"""The registered attention backends and the choice between them."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BackendError
from .contract import AttentionBackend, AttentionRequirements, BackendCapabilities, plans_prefixes, rejections

_BACKENDS: dict[str, AttentionBackend] = {}
_CALLS = ("unavailable", "attend_rows", "attend_prefix", "attend_tail")


@dataclass(frozen=True)
class BackendChoice:
    """The selected backend and, by name, why the ones before it were passed over."""

    name: str
    rejected: dict[str, list[str]]


def register_backend(backend: AttentionBackend) -> None:
    """Add a backend. The order of registration is the order of preference of ``"auto"``.

    Raises:
        BackendError: it declares no :class:`BackendCapabilities`, lacks a call, plans what it declares to need no plan,
            or the name is taken.
    """
    if not isinstance(getattr(backend, "capabilities", None), BackendCapabilities):
        raise BackendError(f"backend {backend!r} declares no BackendCapabilities; declare every field")
    lacking = [call for call in _CALLS if not callable(getattr(backend, call, None))]
    if lacking:
        raise BackendError(f"backend {backend.name!r} has no {', '.join(lacking)}; see AttentionBackend")
    if plans_prefixes(backend) and backend.capabilities.graph_safe_without_planning:
        raise BackendError(f"backend {backend.name!r} has a plan call but declares graph_safe_without_planning=True")
    if backend.name in (*_BACKENDS, "auto"):
        raise BackendError(f"backend {backend.name!r} is registered already")
    _BACKENDS[backend.name] = backend


def get_backend(name: str) -> AttentionBackend:
    """The registered backend of that name; BackendError lists the known ones."""
    if name not in _BACKENDS:
        raise BackendError(f"unknown attention backend {name!r}; known backends: {', '.join(_BACKENDS)}")
    return _BACKENDS[name]


def select_backend(need: AttentionRequirements, name: str = "auto") -> BackendChoice:
    """The first backend that satisfies ``need``, or the named one.

    Raises:
        BackendError: the named backend, or every backend, lacks something; the reasons are listed.
    """
    rejected: dict[str, list[str]] = {}
    candidates = list(_BACKENDS) if name == "auto" else [get_backend(name).name]
    for candidate in candidates:
        backend = _BACKENDS[candidate]
        missing = backend.unavailable()
        reasons = ([missing] if missing else []) + rejections(backend.capabilities, need, plans_prefixes(backend))
        if not reasons:
            return BackendChoice(candidate, rejected)
        rejected[candidate] = reasons
    listed = "; ".join(f"{backend}: {', '.join(reasons)}" for backend, reasons in rejected.items())
    remedy = "" if name == "auto" else '; choose another backend, or backend="auto"'
    raise BackendError(f"no attention backend can serve this model: {listed}{remedy}")
