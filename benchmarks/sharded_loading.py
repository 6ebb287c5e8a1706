# SPDX-License-Identifier: Apache-2.0
"""What does each rank read and hold when a Kimi-K3 is loaded in parts?

``python -m benchmarks.sharded_loading [--ranks 2 4] [--gib 2] [--check] [--out DIR]`` writes a folder of that size in files of
about 256 MiB (bfloat16, random, deleted afterwards), and loads it on every number of ranks, with experts sliced and dealt.

Per rank:
  read      bytes of the tensor slices it asked for, as a share of all tensors
  disk      bytes that the kernel fetched for it (read_bytes of /proc/self/io): 0 for what is in the page cache, and whole
            pages, shared with the other ranks, for the rest
  weights   bytes of its part
  anon      highest growth of RssAnon, sampled every 2 ms: memory that only this process holds, the weights and all copies
  peak      growth of VmHWM, the highest resident size: with the pages of the mapped file, which the kernel may drop

``--check`` wants anon below the weights and a quarter of a file, and peak below the weights and one file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.measure import RESULTS, save
from dcp_compile.models import KimiK3Config
from dcp_compile.parallel.shard import shard_of

_FILE = 256 * 2**20


def config_of(gib: float) -> KimiK3Config:
    """Four layers, whose experts make up most of the wanted size."""
    hidden, latent, inter, layers = 1024, 1024, 512, 4
    experts = round(gib * 2**30 / (2 * 3 * latent * inter) / (layers - 1) / 8) * 8
    return KimiK3Config(
        vocab_size=32768, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=4096, num_attention_heads=8,
        q_lora_rank=256, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_experts=experts,
        num_experts_per_token=8, num_shared_experts=2, moe_intermediate_size=inter, routed_expert_hidden_size=latent,
        attn_res_block_size=4, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        linear_attn_config={
            "num_heads": 8, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
            "use_full_rank_gate": True, "full_attn_layers": [4], "kda_layers": [1, 2, 3],
        },
    )  # fmt: skip


def write(folder: Path, gib: float) -> None:
    model = AutoModelForCausalLM.from_config(config_of(gib), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=_FILE)


def status() -> dict[str, int]:
    """Bytes by name, of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}


def fetched() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


class Watch:
    """The highest RssAnon while it runs."""

    def __enter__(self) -> Watch:
        self.highest, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self.highest = max(self.highest, status()["RssAnon"])

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()


def load(rank: int, ranks: int, folder: Path, expert_parallel: bool, meeting: Path, results: Path) -> None:
    torch.set_num_threads(1)
    disable_progress_bar()
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    before, on_disk = status(), fetched()
    dist.barrier()
    started = time.perf_counter()
    with Watch() as watch:
        model = AutoModelForCausalLM.from_pretrained(folder, tp_size=ranks, expert_parallel=expert_parallel)
    seconds = time.perf_counter() - started
    found = {
        "read": shard_of(model).bytes_read,
        "disk": fetched() - on_disk,
        "weights": sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]),
        "anon": watch.highest - before["RssAnon"],
        "peak": status()["VmHWM"] - before["VmRSS"],
        "seconds": round(seconds, 2),
    }
    (results / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks: int, folder: Path, expert_parallel: bool) -> list[dict]:
    """One row per rank, each in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place:
        arguments = (ranks, folder, expert_parallel, Path(place) / "meeting", Path(place))
        processes = [context.Process(target=load, args=(rank, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError("a rank failed; its output is above")
        return [json.loads((Path(place) / f"{rank}.json").read_text()) for rank in range(ranks)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--gib", type=float, default=2.0, help="size of the experts (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="exit 1 where a rank holds more than it should")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    disable_progress_bar()
    folder = Path(tempfile.mkdtemp())
    rows, too_much = [], []
    try:
        writer = multiprocessing.get_context("spawn").Process(target=write, args=(folder, options.gib))
        writer.start()  # in a process of its own, whose memory goes with it
        writer.join()
        files = [path.stat().st_size for path in folder.glob("*.safetensors")]
        print(f"{len(files)} files, {sum(files) / 2**30:.2f} GiB, the largest {max(files) / 2**20:.0f} MiB; MiB per rank:")
        print(f"{'ranks':>5} {'experts':>8} {'rank':>4} {'read':>6} {'share':>6} {'disk':>6} {'weights':>8} {'anon':>6} "
              f"{'peak':>6} {'seconds':>8}")  # fmt: skip
        for ranks in options.ranks:
            for expert_parallel in (False, True):
                for rank, row in enumerate(measure(ranks, folder, expert_parallel)):
                    experts = "dealt" if expert_parallel else "sliced"
                    mib = {name: row[name] / 2**20 for name in ("read", "disk", "weights", "anon", "peak")}
                    print(
                        f"{ranks:>5} {experts:>8} {rank:>4} {mib['read']:>6.0f} {row['read'] / sum(files):>6.2f} "
                        f"{mib['disk']:>6.0f} {mib['weights']:>8.0f} {mib['anon']:>6.0f} {mib['peak']:>6.0f} "
                        f"{row['seconds']:>8.2f}",
                        flush=True,
                    )
                    rows.append({"ranks": ranks, "experts": experts, "rank": rank, **row})
                    weights = row["weights"]
                    if row["anon"] > weights + max(files) / 4 or row["peak"] > weights + max(files):
                        too_much.append(rows[-1])
    finally:
        shutil.rmtree(folder)
    save("sharded_loading", {"files": len(files), "bytes": sum(files), "largest": max(files), "loads": rows}, options.out)
    print(*(f"holds too much: {row}" for row in too_much), sep="\n", end="\n" if too_much else "")
    return 1 if options.check and too_much else 0


if __name__ == "__main__":
    sys.exit(main())
