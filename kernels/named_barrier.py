# SPDX-License-Identifier: Apache-2.0
"""Hopper's named barriers: one warpgroup hands shared memory over to another, without waiting for it.

A barrier is a number, needs no memory, and counts the threads of both sides. Gluon has none of its own, so these are
single instructions, executed by every thread of the calling warpgroup. Numbers below FIRST are the compiler's.
PTX ISA, "bar": when a barrier completes, what its threads wrote before they arrived is seen by all that wait.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FIRST = gl.constexpr(6)
_ARRIVE = gl.constexpr("bar.arrive $1, 256;\nmov.u32 $0, 0;")
_WAIT = gl.constexpr("bar.sync $1, 256;\nmov.u32 $0, 0;")


@gluon.jit
def _every_thread(assembly: gl.constexpr, number):
    threads: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    numbers = gl.full([128], number, gl.int32, layout=threads)
    gl.inline_asm_elementwise(assembly, "=r,r", [numbers], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive(number):
    """This warpgroup has written what the barrier guards. Another warpgroup must wait before this one arrives again."""
    _every_thread(_ARRIVE, number)


@gluon.jit
def wait(number):
    """Until another warpgroup has arrived at the barrier, once per arrival."""
    _every_thread(_WAIT, number)
