# SPDX-License-Identifier: Apache-2.0
"""Drafts on 2 and 4 ranks: blocks, tokens and distributions are those of one rank. A covering part of the full grid."""

from __future__ import annotations

import secrets

import pytest

from tests.distributed.drafting import BLOCK
from tests.distributed.full_drafts import failed
from tests.distributed.scripts import run_script

WINDOWS = [1, 8, 40, None]


def greedy(name: str, kind: str, dcp: int, interleave: int, layout: str, length: int, batches=(1, 3), **settings) -> tuple:
    place = {"dcp_size": dcp, "kv_interleave": interleave, "decode_layout": layout, "num_speculative_tokens": length}
    return "greedy", {"name": name, "kind": kind, "batches": list(batches), **place, **settings}


def window(dcp: int, interleave: int, layout: str, kind: str = "latent") -> tuple:
    place = {"dcp_size": dcp, "kv_interleave": interleave, "decode_layout": layout}
    return "window", {"windows": WINDOWS, "kind": kind, **place}


def sampling(acceptance: str, **warpers) -> tuple:
    settings = {"dcp_size": 2, "num_speculative_tokens": 3, "sequences": 250}
    return "sampling", {"acceptance": acceptance, "sampling": {"top_k": 0, **warpers}, **settings}


JOBS = {
    2: [
        window(2, 1, "split"),
        window(2, 4, "flattened"),
        window(2, 2, "split", "grouped"),
        greedy("tiny", "dspark", 2, 1, "flattened", 4, [3], verify="adaptive", draft_window=5),
        greedy("tiny", "dspark", 2, 1, "split", 4),
        greedy("tiny", "oracle", 2, 4, "split", 4, [3]),
        greedy("tiny", "dspark", 2, 1, "split", 4, [3], backend="flashinfer", draft_backend="flashinfer"),
        greedy("tiny", "adversary", 2, BLOCK, "flattened", 7, [3]),
        sampling("standard", temperature=0.8, top_k=6),
        sampling("block", temperature=1.2, top_p=0.9),
        ("stops", {"dcp_size": 2, "num_speculative_tokens": 4}),
    ],
    4: [
        window(4, 1, "split"),
        greedy("tiny", "oracle", 4, 1, "split", 1, [3]),
    ],
}


@pytest.mark.slow
def test_drafts_on_several_ranks() -> None:
    seed = secrets.randbelow(2**31)
    print(f"seed {seed}")
    jobs = {world: [(kind, {**arguments, "seed": seed}) for kind, arguments in group] for world, group in JOBS.items()}
    results = run_script("tests.distributed.drafting", request={"jobs": jobs, "timeout": 400.0}, timeout=800.0)
    for world, group in jobs.items():
        for (kind, arguments), ranks in zip(group, results[str(world)], strict=True):
            assert len(ranks) == world
            if kind == "window":
                assert max(ranks) < 1e-9, arguments
            elif kind == "sampling":  # the ranks have different random numbers
                assert all(rank == ranks[0] for rank in ranks) and ranks[0]["p"] > 1e-3, (arguments, ranks)
            elif kind == "stops":
                assert all(rank == {"new": 5, "wrong_tokens": 0} for rank in ranks), ranks
            else:
                assert all(rank == ranks[0] and not failed(arguments, rank) for rank in ranks), (arguments, ranks)
