# SPDX-License-Identifier: Apache-2.0
"""What ranks that hold parts of a module exchange so that its output is that of the whole one.

Each function changes one module of this rank's model through ``shard.replace``, which can be undone. What the ranks
exchange is in the traced graph like any other operator. The number of a rank is not: it is a buffer, so that the graphs
of all ranks are equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .._compat import EXPERT_PARALLEL

if TYPE_CHECKING:
    from .shard import ModelShard


def sum_output(shard: ModelShard, module: nn.Module) -> None:
    """A projection whose input columns are split: every rank has a partial sum. A bias is added once, to the whole sum."""
    forward = module.forward

    def run(x: Tensor) -> Tensor:
        if module.bias is None:
            return shard.all_reduce(forward(x))
        return shard.all_reduce(nn.functional.linear(x, module.weight)) + module.bias

    shard.replace(module, "forward", run)


def gather_output(shard: ModelShard, module: nn.Module) -> None:
    """A projection whose output rows are split: every rank has some of the columns."""
    forward = module.forward
    shard.replace(module, "forward", lambda x: shard.all_gather(forward(x)))


def look_up(shard: ModelShard, module: nn.Embedding) -> None:
    """An embedding whose rows are split: one rank finds the token, the others add zeros."""
    forward, rows = module.forward, module.weight.shape[0]
    shard.mark(module, shard.tp_rank * rows)

    def run(ids: Tensor) -> Tensor:
        local = ids - module.own
        foreign = (local < 0) | (local >= rows)
        found = forward(local.masked_fill(foreign, 0))
        return shard.all_reduce(found.masked_fill(foreign[..., None], 0))

    shard.replace(module, "forward", run)


def own_heads(shard: ModelShard, module: nn.Identity) -> None:
    """The place behind attention where a rank that makes the queries of several ranks goes on with its own heads."""
    if shard.query_ranks > 1:
        shard.mark(module, shard.tp_rank % shard.query_ranks)
        shard.replace(module, "forward", lambda out: torch.ops.dcp.own_heads(out, module.own, shard.query_ranks))


def own_experts(shard: ModelShard, module: nn.Module) -> None:
    """Experts of which a rank holds some: choices of foreign ones get weight 0 and the id after the last own one,
    which the functions of transformers leave out. The output is a partial sum."""
    forward, count = module.forward, module.gate_up_proj.shape[0]
    shard.mark(module, shard.tp_rank * count)
    shard.replace(module, "num_experts", count)
    shard.replace(module, EXPERT_PARALLEL, True)

    def run(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        local = top_k_index - module.own
        foreign = (local < 0) | (local >= count)
        return forward(hidden_states, local.masked_fill(foreign, count), top_k_weights.masked_fill(foreign, 0))

    shard.replace(module, "forward", run)


def complete_sums(shard: ModelShard, module: nn.Module) -> None:
    """A module that passes the partial sums of its parts to its ``complete``: one message for all of them."""

    def complete(*sums: Tensor) -> tuple[Tensor, ...]:
        widths = [part.shape[-1] for part in sums]
        return shard.all_reduce(torch.cat(sums, dim=-1)).split(widths, dim=-1)

    shard.replace(module, "complete", complete)
