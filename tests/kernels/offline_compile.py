# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels for Hopper as their launchers would, on a machine without a GPU.

Run as a script; prints a JSON list of ``{"case", "kernel", "registers", "stack", "shared", "ordered", "barriers"}``.
``stack`` is bytes of local memory per thread: spilled registers. ``ordered``: see :func:`_ordered`. ``barriers``: numbers of
the named barriers that the compiler uses itself. It runs in a process of its own because the other kernel tests interpret
Triton.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from dcp_compile.kernels import device, kda_verify_hopper, mla_hopper
from dcp_compile.kernels.conv import conv_window, conv_window_verify
from dcp_compile.kernels.kda import kda
from dcp_compile.kernels.kda_verify import kda_verify
from dcp_compile.kernels.kv_write import kv_write
from dcp_compile.kernels.mailbox import view
from dcp_compile.kernels.merge import merge_partials
from dcp_compile.kernels.mla_rows import mla_prefix, mla_rows
from dcp_compile.kernels.mla_tail import mla_tail
from dcp_compile.kernels.peer_gather import gather_heads
from dcp_compile.kernels.peer_merge import merge_ranks
from dcp_compile.kernels.prologue import block_metadata, step_metadata

SHARED_LIMIT = 232448  # bytes of one program on Hopper
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class _Hopper:
    """What the launch path asks a driver for, short of launching."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _resources(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [BIN / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", listing).groups()
    return int(registers), int(stack)


def _ordered(ptx: str) -> bool | None:
    """Whether all warps have read shared memory for the last time before any of them hands over arguments to partitions.

    The memory of the arguments may be that of a reduction before, and the compiler does not see that. None: a kernel
    without partitions.
    """
    start = re.search(r"\bbarrier(?:\.cta)?\.sync", ptx)
    if start is None:
        return None
    reads = list(re.finditer(r"\b(?:ld\.(?:\w+\.)*shared|ldmatrix)", ptx[: start.start()]))
    if not reads:
        return True
    until_stored, _, _ = ptx[reads[-1].end() : start.start()].partition("st.shared")
    return re.search(r"\bbar\.sync\s+0(?:, 128)?;", until_stored) is not None


def _barriers(ptx: str) -> list[int]:
    return sorted({int(number) for number in re.findall(r"\bbar(?:rier)?(?:\.cta)?\.sync\s+(\d+)(?:, \d+)?;", ptx)})


def cases() -> dict[str, Callable[[], object]]:
    """Launches at the sizes of a large model: 96 heads, latent 512, rope 64, 128-wide recurrent heads."""

    def attend(call, batch, rows, dtype=torch.bfloat16, kv_dtype=None, page=64, heads=96, **options):
        q = torch.empty(batch * rows, heads, 576, dtype=dtype)
        cache = torch.empty(3, page, 576, dtype=kv_dtype or dtype)
        table = torch.empty(batch, 64, dtype=torch.int32)
        per_row, per_request = torch.empty(batch * rows, dtype=torch.int32), torch.empty(batch, dtype=torch.int32)
        metadata = {
            mla_rows: (per_row, per_row),
            mla_prefix: (per_request,),
            mla_tail: (per_row, per_request, per_row),
            mla_hopper.mla_rows: (per_row, per_row),
            mla_hopper.mla_prefix: (per_request,),
        }[call]
        kv_scale = (2.5,) if kv_dtype else ()
        return call(q[..., :512], q[..., 512:], cache, table, *metadata, 192**-0.5, *kv_scale, **options)

    def delta(rows, call, batch=2):
        q = torch.empty(batch, rows, 96, 128, dtype=torch.bfloat16)
        g, beta = torch.empty(batch, rows, 96, 128), torch.empty(batch, rows, 96)
        state, records = torch.empty(4, 96, 128, 128), [torch.empty(4, 8, 96, 128) for _ in range(3)]
        slots, positions = torch.empty(batch, dtype=torch.int32), torch.empty(batch, rows, dtype=torch.int64)
        pending = () if call is kda else (*records, slots)
        call(q, q, q, g, beta, state, *pending, slots, positions, 0.1, True)

    def window(rows, verify):
        x = torch.empty(2 * rows, 36864, 1, dtype=torch.bfloat16)
        state, pending = torch.empty(4, 36864, 3, dtype=x.dtype), torch.empty(4, 36864, 8, dtype=x.dtype)
        slots, positions = torch.empty(2, dtype=torch.int32), torch.empty(2, rows, dtype=torch.int64)
        if verify:
            conv_window_verify(x, state, pending, slots, slots, positions)
        else:
            conv_window(x, state, slots, positions)

    def metadata(call):
        positions, table = torch.empty(2, 8, dtype=torch.int64), torch.empty(2, 64, dtype=torch.int32)
        call(positions, table, torch.empty(2, dtype=torch.int64), 64, 1, 8, 1)

    def write(dtype):
        rows = torch.empty(8, 576, dtype=torch.bfloat16)
        cache = torch.empty(3, 64, 576, dtype=dtype)
        kv_write(rows[:, :512], rows[:, 512:], cache, torch.empty(8, dtype=torch.int64), 2.5)

    def merged(parts, rows):
        merge_partials(torch.empty(parts, rows, 96, 512), torch.empty(parts, rows, 96))

    mailbox = view(torch.zeros(8, dtype=torch.int64), 3, 8 * 96, 1152, 10**6)
    partials = torch.empty(8, 96, 512, dtype=torch.bfloat16), torch.empty(8, 96)

    return {
        "hopper rows, one": lambda: attend(mla_hopper.mla_rows, 1, 1),
        "hopper rows, verify": lambda: attend(mla_hopper.mla_rows, 1, 8),
        "hopper rows, divided": lambda: attend(mla_hopper.mla_rows, 8, 8),
        "hopper rows, 200 requests": lambda: attend(mla_hopper.mla_rows, 200, 1, heads=32),
        "hopper rows, 260 requests": lambda: attend(mla_hopper.mla_rows, 260, 1, heads=32),
        "hopper rows, unsplit": lambda: attend(mla_hopper.mla_rows, 64, 8),
        "hopper rows, odd": lambda: attend(mla_hopper.mla_rows, 3, 5, torch.float16, page=128),
        "hopper rows, long": lambda: attend(mla_hopper.mla_rows, 1, 256),
        "hopper rows, draft": lambda: attend(mla_hopper.mla_rows, 4, 7, heads=64),
        "hopper prefix, one": lambda: attend(mla_hopper.mla_prefix, 1, 1),
        "hopper prefix, verify": lambda: attend(mla_hopper.mla_prefix, 8, 8),
        "rows, one": lambda: attend(mla_rows, 1, 1),
        "rows, verify": lambda: attend(mla_rows, 8, 8),
        "rows, float16": lambda: attend(mla_rows, 8, 8, torch.float16),
        "rows, float32": lambda: attend(mla_rows, 1, 8, torch.float32),
        "rows, float8 cache": lambda: attend(mla_rows, 1, 8, kv_dtype=torch.float8_e4m3fn),
        "rows, small pages": lambda: attend(mla_rows, 1, 8, page=16),
        "prefix": lambda: attend(mla_prefix, 8, 8),
        "tail": lambda: attend(mla_tail, 1, 8),
        "tail, many rows": lambda: attend(mla_tail, 8, 8),
        "tail, float8 cache": lambda: attend(mla_tail, 1, 8, kv_dtype=torch.float8_e4m3fn),
        "tail, window": lambda: attend(mla_tail, 1, 8, heads=64, keys=2048),
        "kda, one row": lambda: delta(1, kda),
        "kda, many rows": lambda: delta(16, kda),
        "kda_verify": lambda: delta(8, kda_verify),
        "kda_verify, hopper": lambda: delta(8, kda_verify_hopper.kda_verify),
        "kda_verify, hopper, one request": lambda: delta(8, kda_verify_hopper.kda_verify, 1),
        "kda_verify, hopper, one row": lambda: delta(1, kda_verify_hopper.kda_verify),
        "conv_window": lambda: window(1, False),
        "conv_window, many rows": lambda: window(256, False),
        "conv_window_verify": lambda: window(8, True),
        "step_metadata": lambda: metadata(step_metadata),
        "block_metadata": lambda: metadata(block_metadata),
        "kv_write": lambda: write(torch.bfloat16),
        "kv_write, float8": lambda: write(torch.float8_e4m3fn),
        "merge, ranks": lambda: merged(8, 64),
        "merge, splits": lambda: merged(64, 1),
        "gather_heads": lambda: gather_heads(torch.empty(8, 12, 576, dtype=torch.bfloat16), mailbox),
        "merge_ranks, own heads": lambda: merge_ranks(*partials, 12, mailbox),
        "merge_ranks, all heads": lambda: merge_ranks(*partials, 96, mailbox),
    }


def main() -> None:
    driver.set_active(_Hopper())
    device.multiprocessors = lambda _: 132
    device.shared_memory = lambda _: SHARED_LIMIT
    compiled = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        compiled.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **kwargs)))

    JITFunction.run = compile_only
    report = []
    for case, launch in cases().items():
        if len(sys.argv) > 1 and sys.argv[1] not in case:
            continue
        compiled.clear()
        launch()
        for name, kernel in compiled:
            registers, stack = _resources(kernel.asm["cubin"])
            entry = dict(case=case, kernel=name, registers=registers, stack=stack, shared=kernel.metadata.shared)
            ptx = re.sub(r"// begin inline asm.*?// end inline asm", "", kernel.asm["ptx"], flags=re.DOTALL)
            report.append(entry | dict(ordered=_ordered(ptx), barriers=_barriers(ptx)))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
