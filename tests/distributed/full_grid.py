# SPDX-License-Identifier: Apache-2.0
"""Every combination of model, ranks, interleave, layout and prefill chunk against transformers; test_grid.py runs a part.

``python -m tests.distributed.full_grid [--worlds 1 2 4] [--models ...] [--seed N]`` prints the number of settings, failures
and the largest logit error per number of ranks and model, every failing setting, and exits with 1 if there is one. Each
setting decodes prompts of all lengths up to 2 * dcp * interleave + 3 (the trained model: those around the borders of a round
of dealing) and three long ones. It takes about two hours on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import secrets
import sys
from collections.abc import Iterator

from tests.distributed.grid import CHUNKS, INTERLEAVES, LAYOUTS, Setting, run
from tests.runtime.reference import MODELS, TOLERANCE, TRAINED

SIZES = {1: [(1, 1)], 2: [(1, 2), (2, 1), (2, 2)], 4: [(1, 4), (4, 1), (4, 2), (4, 4)]}
"""(tp, dcp) by number of ranks."""

_MOST_PARTS = {"kimi_linear": 1, "mini": 2}  # one's class names no recurrent heads to shard, the other has two of them
_HOURS = 6 * 3600.0


def settings(world: int, model: str) -> Iterator[Setting]:
    """Plain decoding for every chunk size; verify rounds with short, medium and long drafts, prefixes of any age, and
    planned ones."""
    for (tp, dcp), interleave, layout in itertools.product(SIZES[world], INTERLEAVES, LAYOUTS):
        if tp > _MOST_PARTS.get(model, tp) or (tp > 1 and dcp == 1 and interleave > 1):
            continue
        drafts = {1: 4, 4: 1, 8: 7}[interleave]
        for chunk in CHUNKS:
            yield Setting(model, tp, dcp, interleave, layout, chunk)
        if min(tp, dcp) > 1 and model in ("kimi_k3", "mini"):
            yield Setting(model, tp, dcp, interleave, layout, 5, replicated=True)
            yield Setting(model, tp, dcp, interleave, layout, 64, speculation=drafts, replicated=True)
        yield Setting(model, tp, dcp, interleave, layout, 64, speculation=drafts, stale=layout == "split")
        if layout == "split":
            yield Setting(model, tp, dcp, interleave, layout, 64, speculation=drafts, backend="flashinfer")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--models", nargs="+", choices=[*MODELS, *TRAINED], default=[*MODELS, *TRAINED])
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    failures = 0
    for world, model in itertools.product(arguments.worlds, arguments.models):
        wanted = {world: list(settings(world, model))}
        results = list(run(wanted, arguments.seed, sparse=model in TRAINED, timeout=_HOURS))
        bad = [result for result in results if result["wrong_tokens"] or not result["error"] <= TOLERANCE]
        largest = max(result["error"] for result in results)
        print(f"{world} ranks, {model}: {len(results)} settings, {len(bad)} failed, largest error {largest:.2e}", flush=True)
        print(*map(json.dumps, bad), sep="\n", end="\n" if bad else "")
        failures += len(bad)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
