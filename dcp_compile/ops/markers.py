# SPDX-License-Identifier: Apache-2.0
"""Marker operators: where a traced model touches its cache, its attention and its recurrent state.

A marker is pure and carries, as arguments, every tensor its lowered form will need, so that the tracer lifts those
tensors to graph inputs. Markers exist between capture and the passes only; running one is an error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InvariantError
from ._library import define, fake, reference

define(
    "mark_latent(Tensor first, Tensor second, Tensor kv_cache, Tensor block_table, Tensor positions, "
    "Tensor prefix_lengths, int layer) -> (Tensor, Tensor)"
)
define("mark_attention(Tensor q, Tensor k, Tensor v, int layer, float scale) -> Tensor")
define(
    "mark_conv(Tensor x, Tensor conv_state, Tensor pending, Tensor accepted, Tensor state_slots, Tensor positions, "
    "int layer, int width) -> Tensor"
)
define(
    "mark_recurrence(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state, Tensor pending_k, "
    "Tensor pending_u, Tensor pending_g, Tensor accepted, Tensor state_slots, Tensor positions, int layer, "
    "float scale, bool qk_l2norm) -> Tensor"
)
# Around a module that is traced for others of its kind, and in place of one whose calls are copied (see repeats.py).
define("mark_enter(Tensor[] values, int call) -> Tensor[]")
define("mark_leave(Tensor[] values, int call) -> Tensor[]")
define("mark_repeat(Tensor[] values, Tensor[] like, int call, int original) -> Tensor[]")

_LAYER_ARGUMENT = {"mark_latent": 6, "mark_attention": 3, "mark_conv": 6, "mark_recurrence": 12}
NAMES = tuple(_LAYER_ARGUMENT)
SPANS = ("mark_enter", "mark_leave", "mark_repeat")
LAYER_ARGUMENT = {getattr(torch.ops.dcp, name).default: index for name, index in _LAYER_ARGUMENT.items()}
"""Where a marker has its layer number."""


def layer_of(node: torch.fx.Node) -> int:
    """Layer number a marker call belongs to."""
    return node.args[LAYER_ARGUMENT[node.target]]


def _refuse(name: str):
    def run(*args, **kwargs):
        raise InvariantError(
            f"marker operator dcp::{name} was executed; every marker must be lowered by the passes first"
        )

    return run


for _name in (*NAMES, *SPANS):
    reference(_name)(_refuse(_name))


@fake("mark_latent")
def _(first, second, kv_cache, block_table, positions, prefix_lengths, layer) -> tuple[Tensor, Tensor]:
    return torch.empty_like(first), torch.empty_like(second)


@fake("mark_attention")
def _(q, k, v, layer, scale) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])


@fake("mark_conv")
def _(x, conv_state, pending, accepted, state_slots, positions, layer, width) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], width)


@fake("mark_recurrence")
def _(
    q, k, v, g, beta, state, pending_k, pending_u, pending_g, accepted, state_slots, positions, layer, scale, qk_l2norm
) -> Tensor:
    return v.new_empty(v.shape)


def _like(values) -> list[Tensor]:
    return [value.new_empty_strided(value.shape, value.stride()) for value in values]


@fake("mark_enter")
def _(values, call) -> list[Tensor]:
    return _like(values)


@fake("mark_leave")
def _(values, call) -> list[Tensor]:
    return _like(values)


@fake("mark_repeat")
def _(values, like, call, original) -> list[Tensor]:
    return _like(like)
