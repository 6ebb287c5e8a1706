# SPDX-License-Identifier: Apache-2.0
"""Proof by execution that a layer's keys and values are plain MLA up-projections.

The cone between (latent, rope key, up-projection weight) and (k, v) is cut out of the graph and run on integer probes
that are exact in the graph's dtype; its results must equal ``[latent @ W_uk^T | rope]`` and ``latent @ W_uv^T`` to the
bit. That covers every spelling a model may use (cat, slice writes, split, permute) without a pattern for each. One
probe is 3-hot, which shows every weight on its own; one is dense, so that a function which only agrees on zeros and
ones is noticed.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from dcp_compile import _compat
from dcp_compile.errors import MatchError

from .graph_tools import cone, dcp, hint, is_size, value

if TYPE_CHECKING:
    from .match_mla import MLASite


def certify(site: MLASite, module: fx.GraphModule) -> None:
    """Raise MatchError unless ``site``'s keys and values are what absorption assumes.

    Args:
        site: a candidate :class:`~dcp_compile.passes.match_mla.MLASite`.
    """
    run = _cut_out(site, module)
    generator = torch.Generator().manual_seed(site.layer)
    device = value(site.weight).device
    for latent, weight in (_three_hot(site, generator), _dense(site, generator)):
        rope = torch.randint(-64, 65, _sizes(site.rope), generator=generator)
        with _compat.unset_fake_temporarily(), torch.no_grad():
            dtype = value(site.latent).dtype
            latent, rope, weight = (x.to(device=device, dtype=dtype) for x in (latent, rope, weight))
            key, val = run(latent, rope, weight)
            want_key, want_val = _absorbed_view(site, latent, rope, weight, key)
            _compare(site, "key", key, want_key, "[latent @ W_uk | k_rope]")
            _compare(site, "value", val, want_val, "latent @ W_uv")


def _sizes(node: fx.Node) -> list[int]:
    return [hint(size) for size in value(node).shape]


def _three_hot(site, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    latent = torch.zeros(_sizes(site.latent)).flatten(0, -2)
    hot = torch.rand(latent.shape, generator=generator).topk(min(3, latent.shape[1]), dim=1).indices
    latent.scatter_(1, hot, 1.0)
    return latent.view(_sizes(site.latent)), torch.randint(-8, 9, _sizes(site.weight), generator=generator)


def _dense(site, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    latent = torch.randint(-2, 3, _sizes(site.latent), generator=generator)
    return latent, torch.randint(-1, 2, _sizes(site.weight), generator=generator)


def _absorbed_view(site, latent: Tensor, rope: Tensor, weight: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, rows, _ = key.shape
    latent = latent.reshape(batch, 1, rows, site.latent_dim)
    rope = rope.reshape(batch, 1, rows, site.rope_dim).expand(-1, heads, -1, -1)
    per_head = weight.view(site.heads, site.nope_dim + site.value_dim, site.latent_dim).transpose(1, 2)
    expanded = latent @ per_head
    return torch.cat([expanded[..., : site.nope_dim], rope], dim=-1), expanded[..., site.nope_dim :]


def _compare(site, what: str, found: Tensor, wanted: Tensor, formula: str) -> None:
    if found.shape == wanted.shape and torch.equal(found, wanted):
        return
    gap = f"max difference {float((found - wanted).abs().max()):.3g}" if found.shape == wanted.shape else (
        f"shape {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    )  # fmt: skip
    raise MatchError(
        f"{site.where}: the {what} is not {formula} ({gap}): something is applied to it between the up-projection and "
        "attention (a norm, a permutation, a scale?), so absorbing the up-projection would change results; this layer "
        "cannot be optimised"
    )


def _cut_out(site, module: fx.GraphModule):
    """``(latent, rope, weight) -> (k, v)``: runs the cone at the traced sizes; cache markers pass through."""
    interior, leaves = cone([site.key, site.value], [site.latent, site.rope])
    sizes = {leaf for leaf in leaves if is_size(leaf)}
    foreign = leaves - {site.latent, site.rope, site.weight} - sizes
    if foreign:
        names = ", ".join(sorted(node.name for node in foreign))
        raise MatchError(f"{site.where}: key and value depend on more than latent, rope key and one weight: {names}")
    graph = fx.Graph()
    copied: dict[fx.Node, object] = {leaf: hint(value(leaf)) for leaf in sizes}
    for leaf in (site.latent, site.rope, site.weight):
        copied[leaf] = graph.placeholder(leaf.name)
    for node in module.graph.nodes:
        if node not in interior:
            continue
        if node.target is dcp.mark_latent.default:
            copied[node] = tuple(copied.get(argument) for argument in node.args[:2])
        elif node.target is operator.getitem and isinstance(copied[node.args[0]], tuple):
            copied[node] = copied[node.args[0]][node.args[1]]
        else:
            copied[node] = graph.create_node(
                node.op, node.target, fx.map_arg(node.args, copied.get), fx.map_arg(node.kwargs, copied.get)
            )
    graph.output((copied[site.key], copied[site.value]))
    return fx.GraphModule(module, graph)
