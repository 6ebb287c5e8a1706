# SPDX-License-Identifier: Apache-2.0
"""What a pass is told, and what it reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class PassContext:
    """Settings all passes share.

    Attributes:
        rank, dcp_size, interleave: this rank's place in the token layout.
        block_size, pages: tokens per page and pages of one rank's pool (page 0 is the null page).
        kv_dtype, kv_scale: element type of the caches (None: the model's), and what their values are multiplied by.
        state_slots: sequences that hold recurrent state at once.
        verify_rows: rows a verify step may leave pending (M).
        verify: lower recurrent layers to their verify form.
        causal: rows of a request see themselves and what is before them; else all rows see one another.
        layout: "split", "flattened" or, for blocks with a window, "tail".
        window: committed tokens that rows of such a block see at most.
        backend: name of the attention backend.
        group: name of the DCP process group; None when dcp_size is 1.
        heads_sharded: each rank of the group goes on with its own heads, else every rank with all of them.
    """

    rank: int = 0
    dcp_size: int = 1
    interleave: int = 1
    block_size: int = 64
    pages: int = 2
    kv_dtype: torch.dtype | None = None
    kv_scale: float = 1.0
    state_slots: int = 1
    verify_rows: int = 1
    verify: bool = False
    causal: bool = True
    layout: str = "split"
    window: int = 0
    backend: str = "torch"
    group: str | None = None
    heads_sharded: bool = False


@dataclass
class PassResult:
    """What one pass did.

    Attributes:
        name: of the pass. matches: sites it rewrote.
        before, after: calls per operator around it (prologue included).
        seconds: its run time, checks excluded.
    """

    name: str
    matches: int
    before: Counter[str] = field(default_factory=Counter)
    after: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
