# SPDX-License-Identifier: Apache-2.0
"""How do attention, its exchange and a whole decode step scale over the GPUs of one host?

Kimi-K3 shapes, bf16, on every power of two of the GPUs found. Its parts run in processes of their own:

* exchange: gathering the query heads and merging the partials of one MLA layer, by NCCL and through peer memory, with heads
  sharded over the ranks and with all heads on every rank;
* attention: the partial attention of one rank against the cost model (bytes and FLOPs, fitted on one GPU);
* step: a decode and a verify step of four layers with replicated weights, and what the caches hold per rank;
* tokens: what the mini pair generates in float32 against transformers on the CPU, with and without the draft;
* lost-peers, lost-collectives: what the others do, and after how long, when the last rank is killed while it replays graphs
  that exchange through peer memory or by NCCL.

``python -m benchmarks.dcp_scaling [--gpus 1 2] [--parts PART ...] [--check] [--out DIR]``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.measure import RESULTS, graph_time, roofline, save

HEADS, LATENT, ROPE = 96, 512, 64
CONTEXTS = (131072, 524288, 1048576)
PARTS = ("exchange", "attention", "step", "tokens", "lost-peers", "lost-collectives")
LIMIT_S, LOST_S = 300, 10.0
EXPOSED_US = {2: 12.0, 4: 15.0, 8: 15.0}
"""Longest exchange of one MLA layer through peer memory, up to 8 rows."""


def exchange(size: int) -> list[dict]:
    from dcp_compile.kernels import peer_gather, peer_merge
    from dcp_compile.ops import exchange as collectives
    from dcp_compile.parallel.peers import MAILBOXES, open_exchange

    group = dist.group.WORLD
    device = torch.device("cuda", torch.cuda.current_device())
    path = open_exchange(group, device, "peers", 64, HEADS, (LATENT + ROPE) * 2, 20.0)
    boxes, rank, name = MAILBOXES[group.group_name], dist.get_rank(), group.group_name
    rows_found = []
    for rows in (1, 8, 64):
        query = torch.randn(rows, HEADS // size, LATENT + ROPE, device=device, dtype=torch.bfloat16)
        out = torch.randn(rows, HEADS, LATENT, device=device, dtype=torch.bfloat16)
        lse = torch.randn(rows, HEADS, device=device)
        lse[:, rank] = -torch.inf

        def by_nccl(heads: int) -> torch.Tensor:
            if heads < HEADS:
                collectives.gather_heads(query, size, name)
            return collectives.merge_ranks(out, lse, heads, size, name)

        def by_peers(heads: int) -> torch.Tensor:
            if heads < HEADS:
                peer_gather.gather_heads(query, boxes.gather)
            return peer_merge.merge_ranks(out, lse, heads, boxes.merge)

        error = float((peer_gather.gather_heads(query, boxes.gather) - collectives.gather_heads(query, size, name)).abs().max())
        for heads in (HEADS // size, HEADS):
            error = max(error, float((by_peers(heads).float() - by_nccl(heads).float()).abs().max()))
            row = {"rows": rows, "heads": "sharded" if heads < HEADS else "replicated", "path": path.name, "error": error}
            for label, call in (("nccl_us", by_nccl), ("peers_us", by_peers)):
                dist.barrier()
                row[label] = round(graph_time(lambda: call(heads), 20), 2)  # noqa: B023
            rows_found.append(row)
    return rows_found


def attention(size: int) -> list[dict]:
    from dcp_compile.backends import get_backend
    from dcp_compile.layout import local_length

    backend = get_backend("hopper" if get_backend("hopper").unavailable() is None else "triton")
    rank, found = dist.get_rank(), []
    for context in CONTEXTS:
        local = local_length(context, rank, size, 1)
        pages = -(-local // 64)
        cache = torch.randn(1 + pages, 64, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
        table = torch.arange(1, 1 + pages, device="cuda", dtype=torch.int32)[None]
        for rows, heads in itertools.product((1, 8), (HEADS, HEADS // 2)):
            query = torch.randn(rows, heads, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
            requests = torch.zeros(rows, device="cuda", dtype=torch.int32)
            operands = (query[..., :LATENT], query[..., LATENT:], cache, table, requests, requests + local, 0.07)
            micros = graph_time(lambda: backend.attend_rows(*operands))  # noqa: B023
            floor = roofline(local * (LATENT + ROPE) * 2, 2 * rows * heads * local * (2 * LATENT + ROPE))
            found.append({
                "context": context, "rows": rows, "heads": heads, "us": round(micros, 1), "roofline_us": round(floor, 1)
            })  # fmt: skip
    return found


def step(size: int) -> list[dict]:
    import dcp_compile
    from benchmarks.decode_step import ROWS, build, measure

    torch.manual_seed(0)  # every rank holds the same weights
    model = build()
    config = dcp_compile.DCPConfig(max_batch_size=1, max_seq_len=CONTEXTS[-1] + 64, num_speculative_tokens=ROWS - 1)
    dcp_compile.optimize(model, dcp_size=size, config=config)
    caches = sum(tensor.nbytes for ref, tensor in model._dcp_engine.states.items() if ref.kind == "kv_cache")
    found = []
    for context, rows in itertools.product(CONTEXTS, (1, ROWS)):
        row, _ = measure(model._dcp_engine, context, rows)
        found.append(row | {"kv_cache_bytes": caches, "tokens": config.max_seq_len})
    return found


def tokens(size: int) -> list[dict]:
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    import dcp_compile
    from dcp_compile.models.mini import draft_path, mini_path

    torch.backends.cuda.enable_cudnn_sdp(False)
    target = mini_path()
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    draft = AutoModel.from_pretrained(draft_path(), dtype=torch.float32).cuda().eval()
    ids = AutoTokenizer.from_pretrained(target)("def read_lines(path):\n", return_tensors="pt").input_ids
    options = {"max_new_tokens": 48, "do_sample": False}
    wanted, ids = model.generate(ids, **options).cuda(), ids.cuda()
    model.cuda()
    found = []
    for how in ("peers", "collectives") if size > 1 else ("auto",):
        config = dcp_compile.DCPConfig(max_batch_size=1, max_seq_len=128, exchange=how, lowering="eager")
        dcp_compile.optimize(model, dcp_size=size, config=config, draft=draft)
        same = [torch.equal(model.generate(ids, **options, **extra), wanted) for extra in ({}, {"assistant_model": draft})]
        found.append({"exchange": how, "same_tokens": same[0], "same_tokens_with_draft": same[1]})
        dcp_compile.unoptimize(model)
    return found


def lost(size: int, path: str) -> list[dict]:
    from transformers import AutoModelForCausalLM

    import dcp_compile
    from dcp_compile.models.mini import mini_path

    model = AutoModelForCausalLM.from_pretrained(mini_path(), dtype=torch.bfloat16).cuda().eval()
    model.generation_config.eos_token_id = None
    config = dcp_compile.DCPConfig(
        max_batch_size=1, max_seq_len=8192, lowering="eager", timeout=LOST_S, num_speculative_tokens=0, exchange=path
    )
    dcp_compile.optimize(model, dcp_size=size, config=config)
    ids = torch.tensor([[5, 6, 7]], device="cuda")
    model.generate(ids, max_new_tokens=4, do_sample=False)
    if dist.get_rank() == size - 1:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    started = time.monotonic()
    try:
        model.generate(ids, max_new_tokens=8000, do_sample=False)
        error = "none"
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"[:100]
    return [{"exchange": path, "error": error, "seconds": round(time.monotonic() - started - 1.0, 1), "limit_s": LOST_S}]


def work(part: str, folder: Path) -> None:
    """One rank of one part; it writes its rows to a file of its own."""
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    name, _, path = part.partition("-")
    jobs = {"exchange": exchange, "attention": attention, "step": step, "tokens": tokens, "lost": lost}
    rows = jobs[name](size, *filter(None, [path]))
    (folder / f"{rank}.json").write_text(json.dumps(rows))
    if name != "lost":
        dist.barrier()
    os._exit(0)  # graphs that hold collectives need not be taken apart


def run(part: str, size: int) -> list[dict]:
    """The rows of a part on ``size`` GPUs: times are those of the slowest rank, also of those that a lost one leaves behind."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "benchmarks.dcp_scaling", "--work", part, "--folder", folder]
        place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        # Not torchrun: it would end the ranks that a lost one leaves behind.
        ranks = [subprocess.Popen(command, env=os.environ | place | {"RANK": str(rank)}) for rank in range(size)]
        try:
            for process in ranks[: size - 1] if part.startswith("lost") else ranks:
                if process.wait(timeout=LIMIT_S):
                    raise subprocess.CalledProcessError(process.returncode, command)
        finally:
            for process in ranks:
                process.kill()
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    return [{"gpus": size, **max(same, key=taken)} for same in zip(*ranks)]


def taken(row: dict) -> float:
    """The time that a row is about."""
    return next((row[name] for name in ("us", "peers_us", "seconds") if name in row), 0.0)


def misses(found: dict[str, list[dict]]) -> list[str]:
    """Every limit that is not met."""
    missed = []
    for row in found.get("exchange", []):
        limit = EXPOSED_US.get(row["gpus"])
        if limit and row["rows"] <= (64 if row["gpus"] == 2 else 8) and row["peers_us"] > limit:
            missed.append(f"exchange on {row['gpus']} GPUs, {row['rows']} rows, {row['heads']}: {row['peers_us']} us, limit {limit}")
    for row in found.get("lost-peers", []) + found.get("lost-collectives", []):
        if not row["error"].startswith("RankError") or row["seconds"] > 2 * row["limit_s"]:
            missed.append(f"a lost rank: {row}")
    for row in found.get("tokens", []):
        if not (row["same_tokens"] and row["same_tokens_with_draft"]):
            missed.append(f"tokens differ: {row}")
    caches = {row["gpus"]: row["kv_cache_bytes"] for row in found.get("step", [])}
    for gpus, nbytes in caches.items():
        if gpus > 1 and 1 in caches:
            held, wanted = caches[1] / nbytes, gpus * (0.975 if gpus == 2 else 0.97)
            if held < wanted:
                missed.append(f"capacity on {gpus} GPUs {held:.2f}x, wanted {wanted:.2f}x")
    alone = {(r["context"], r["rows"], r["heads"]): r for r in found.get("attention", []) if r["gpus"] == 1}
    for row in found.get("attention", []):
        place = row["context"], row["rows"]
        if row["gpus"] != 2 or row["context"] != 524288 or row["heads"] != HEADS or (*place, HEADS) not in alone:
            continue
        share = row["us"] / alone[(*place, HEADS)]["us"]
        if share > 0.55:
            missed.append(f"attention on 2 GPUs at 524288, {row['rows']} rows: {share:.2f} of one GPU's, limit 0.55")
        # With heads sharded, one GPU has half the heads over the whole context, two have all heads over half of it.
        before = alone[(*place, HEADS // 2)]
        share, wanted = row["us"] / before["us"], row["roofline_us"] / before["roofline_us"]
        if share > 1.15 * wanted:
            missed.append(f"attention with sharded heads, {row['rows']} rows: {share:.2f}, predicted {wanted:.2f}")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", help="default: 1, 2, 4, ... as far as there are")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--check", action="store_true", help="exit 1 where a limit is missed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--work", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.folder)
    sizes = arguments.gpus or [1 << power for power in range(torch.cuda.device_count().bit_length())]
    found: dict[str, list[dict]] = {}
    failed = []
    for part in arguments.parts:
        for size in sizes:
            if size == 1 and part.startswith(("exchange", "lost")):
                continue
            try:
                rows = run(part, size)
            except (subprocess.SubprocessError, OSError) as error:
                failed.append(f"{part} on {size} GPUs failed: {error}")
                rows = []
            found.setdefault(part, []).extend(rows)
            print(*rows, sep="\n", flush=True)
        save("dcp_scaling", found, arguments.out)
    missed = failed + misses(found)
    print("missed:", *(missed or ["nothing"]), sep="\n  ")
    return 1 if arguments.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
