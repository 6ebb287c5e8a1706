# SPDX-License-Identifier: Apache-2.0
"""Every combination of pair, draft, ranks, interleave, layout and draft length against transformers; test_drafting.py runs
a part.

``python -m tests.distributed.full_drafts [--worlds 1 2 4] [--seed N]`` prints the number of settings and of failures per
pair and number of ranks, every failing setting, and exits with 1 if there is one. Each setting decodes a batch of one and
one of three ragged rows, the trained pair also adaptively with a window.
"""

from __future__ import annotations

import argparse
import itertools
import json
import secrets
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from tests.distributed.drafting import BLOCK, STEPS, run

LENGTHS = (1, 4, 7)
KINDS = {"tiny": ("dspark", "oracle", "adversary"), "mini": ("dspark", "adaptive")}
_HOURS = 6 * 3600.0


def jobs(name: str, dcp: int, seed: int) -> Iterator[dict[str, Any]]:
    """Arguments of check_greedy."""
    interleaves = (1, 4, BLOCK) if dcp > 1 else (1,)  # one rank holds every token, however they are dealt
    for interleave, layout, length, kind in itertools.product(
        interleaves, ("split", "flattened"), LENGTHS, KINDS[name]
    ):
        settings = {"dcp_size": dcp, "kv_interleave": interleave, "decode_layout": layout}
        if kind == "adaptive":
            kind, settings = "dspark", settings | {"verify": "adaptive", "draft_window": 5}
        yield {
            "name": name, "seed": seed, "kind": kind, "batches": [1, 3], "num_speculative_tokens": length, **settings,
        }  # fmt: skip


def failed(job: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
    """Wrong tokens, or rounds that commit other than K+1 tokens with the right drafts and 1 with the wrong ones."""
    each = {"oracle": job["num_speculative_tokens"] + 1, "adversary": 1}.get(job["kind"])
    rounds = None if each is None else -(-(STEPS - 1) // each)
    return result["wrong_tokens"] > 0 or (rounds is not None and set(result["rounds"]) != {rounds})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", choices=(1, 2, 4), default=[1, 2, 4])
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    failures = 0
    for world, name in itertools.product(arguments.worlds, KINDS):
        group = list(jobs(name, world, arguments.seed))
        results = run({world: [("greedy", job) for job in group]}, timeout=_HOURS)[world]
        bad = [job for job, ranks in zip(group, results) if any(failed(job, result) for result in ranks)]
        fewest = min(sum(result["rounds"]) for ranks in results for result in ranks)
        print(f"{world} ranks, {name}: {len(group)} settings, {len(bad)} failed, fewest rounds {fewest}", flush=True)
        print(*map(json.dumps, bad), sep="\n", end="\n" if bad else "")
        failures += len(bad)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
