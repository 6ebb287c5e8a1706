# SPDX-License-Identifier: Apache-2.0
"""The four partitions of the Hopper attention kernel: see mla_hopper.py for how they work together."""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .named_barrier import FIRST, arrive, wait

LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
BLOCK = gl.constexpr(64)  # keys per stage, and (row, head) pairs per program
CHUNK = gl.constexpr(128)
EMPTY = gl.constexpr(-(2**30))  # bound of a row that sees no key
RISE = gl.constexpr(8.0)  # P is at most 2 to the power of it
NO_ROW = gl.constexpr(1e30)  # shift of what is no row at all: its P is 0, which takes the least power
# Named barriers: by stage for the lower half of the latent columns, then for the upper half.
RESCALE = FIRST
P_READY = gl.constexpr(FIRST.value + 4)
CLOSING = gl.constexpr(FIRST.value + 8)
LN_2 = gl.constexpr(math.log(2.0))


@gluon.jit
def _fetch(descriptor, line, column: gl.constexpr, width: gl.constexpr, full, empty, target, phase):
    mbarrier.wait(empty, phase)
    mbarrier.expect(full, BLOCK * width * 2)
    tma.async_copy_global_to_shared(descriptor, [line, column], full, target)


@gluon.jit
def _page(table_row, column_stride, block, last, PAGE: gl.constexpr):
    """Page of a block; 0 past the last one."""
    return gl.load(table_row + block // (PAGE // BLOCK) * column_stride, mask=block < last, other=0)


@gluon.jit
def _line(page, page_lines, block, PAGE: gl.constexpr):
    return page * page_lines + block % (PAGE // BLOCK) * BLOCK


@gluon.jit
def _prefetch(cache, line, SHARERS: gl.constexpr):
    """Have this program's one of SHARERS parts of a block brought into L2, by a single instruction of the first lane."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    width: gl.constexpr = LATENT + ROPE
    start = line.to(gl.int64) + gl.program_id(0) * (BLOCK // SHARERS)
    size = gl.where(lane == 0, BLOCK // SHARERS * width * 2, 0)
    gl.inline_asm_elementwise(
        """{
        .reg .pred some;
        setp.ne.b32 some, $2, 0;
        @some cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [cache + start * width + lane, size], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def producer(keys, buffers, barriers, plan, PAGE: gl.constexpr, SHARERS: gl.constexpr):
    latent_keys, rope_keys, cache, table_row, column_stride, page_lines = keys
    _, _, k_latent, k_rope, _, _ = buffers
    _, latent_full, latent_empty, rope_full, rope_empty = barriers
    first, blocks = plan
    last = first + blocks
    # Table entries are read long before they are needed: this warp must not wait for one while a stage is empty.
    page0 = _page(table_row, column_stride, first, last, PAGE)
    page1 = _page(table_row, column_stride, first + 1, last, PAGE)
    page2 = _page(table_row, column_stride, first + 2, last, PAGE)
    page3 = _page(table_row, column_stride, first + 3, last, PAGE)
    shares = gl.program_id(0) < SHARERS
    for j in range(blocks):
        stage = j & 1
        phase = ((j >> 1) & 1) ^ 1
        block = first + j
        line = _line(page0, page_lines, block, PAGE)
        # In the order in which they become empty: the values warpgroups start at chunks 0 and 2, and P stays longest.
        for half in gl.static_range(2):
            for side in gl.static_range(2):
                i = stage * 4 + side * 2 + half
                _fetch(
                    latent_keys, line, (side * 2 + half) * CHUNK, CHUNK,
                    latent_full.index(i), latent_empty.index(i), k_latent.index(i), phase,
                )  # fmt: skip
        _fetch(rope_keys, line, LATENT, ROPE, rope_full.index(stage), rope_empty.index(stage), k_rope.index(stage), phase)
        if SHARERS > 0:
            if shares & (j == 0) & (blocks > 2):
                _prefetch(cache, _line(page2, page_lines, block + 2, PAGE), SHARERS)
            if shares & (j + 3 < blocks):
                _prefetch(cache, _line(page3, page_lines, block + 3, PAGE), SHARERS)
        page0 = page1
        page1 = page2
        page2 = page3
        page3 = _page(table_row, column_stride, block + 4, last, PAGE)


@gluon.jit
def _product(q_latent, q_rope, k_latent, k_rope, latent_full, rope_full, stage, phase, zero, zero_index):
    """Issue S = Q K^T of one block, chunk by chunk as they arrive.

    ``zero_index`` is 0, but not provably so: the addresses of constant operands would all be kept in registers.
    """
    s = zero
    for half in gl.static_range(2):
        for side in gl.static_range(2):
            i = stage * 4 + side * 2 + half
            mbarrier.wait(latent_full.index(i), phase)
            q = side * 2 + half
            if half == 1:
                q += zero_index
            k = k_latent.index(i).permute((1, 0))
            s = warpgroup_mma(q_latent.index(q), k, s, use_acc=half + side > 0, is_async=True)
    mbarrier.wait(rope_full.index(stage), phase)
    return warpgroup_mma(q_rope, k_rope.index(stage).permute((1, 0)), s, is_async=True)


@gluon.jit
def _clean(k_latent, stage, written):
    """Zero the latents of a block behind its first ``written`` keys: 0 * NaN would reach the output."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    key = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    for i in range(stage * 4, stage * 4 + 4):
        chunk = k_latent.index(i)
        value = chunk.load(layout)
        chunk.store(gl.where((key < written)[:, None], value, 0.0).to(value.dtype))


@gluon.jit
def _softmax(s, top, total, stage, buffers, FACTOR: gl.constexpr):
    """Publish the rescaling factor of one block and store its P; returns the row's shift (in log 2) and its sum.

    The shift is a maximum that is out of date by up to RISE: P, its sum and the values agree on it whatever it is, and
    while it stays no output has to be rescaled.
    """
    _, _, _, k_rope, rescale, _ = buffers
    own = gl.max(s, 1) * FACTOR
    new_top = gl.where(own > top + RISE, own, top)
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)
    alpha = gl.exp2(top - shift)
    p = gl.exp2(s * FACTOR - shift[:, None])
    rescale.index(stage).store(alpha)
    gl.thread_barrier()  # all warps have read the rope keys as well, whose place P takes
    arrive(RESCALE + stage)
    arrive(RESCALE + 2 + stage)
    k_rope.index(stage).store(p.to(k_rope.dtype))
    return new_top, total * alpha + gl.sum(p, 1)


@gluon.jit
def _publish(stage):
    """Hand P, and what else was stored, to the values warpgroups."""
    fence_async_shared()
    arrive(P_READY + stage)
    arrive(P_READY + 2 + stage)


@gluon.jit
def scores(buffers, barriers, couples, seen, pairs, opaque_zero, FACTOR: gl.constexpr):
    q_latent, q_rope, k_latent, k_rope, _, closing = buffers
    q_full, latent_full, _, rope_full, _ = barriers
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    rows: gl.constexpr = gl.SliceLayout(1, mma)
    top = gl.where(gl.arange(0, BLOCK, layout=rows) < pairs, float("-inf"), NO_ROW)
    total = gl.full([BLOCK], 0.0, gl.float32, layout=rows)
    zero = gl.zeros([BLOCK, BLOCK], gl.float32, layout=mma)
    mbarrier.wait(q_full, 0)
    for i in range(couples):
        phase = i & 1
        even = (i * opaque_zero) & 1  # stage 0
        odd = even ^ 1
        s0 = _product(q_latent, q_rope, k_latent, k_rope, latent_full, rope_full, even, phase, zero, even)
        s1 = _product(q_latent, q_rope, k_latent, k_rope, latent_full, rope_full, odd, phase, zero, even)
        s0 = warpgroup_mma_wait(5, deps=[s0])
        top, total = _softmax(s0, top, total, even, buffers, FACTOR)
        _publish(even)
        s1 = warpgroup_mma_wait(0, deps=[s1])
        top, total = _softmax(s1, top, total, odd, buffers, FACTOR)
        _publish(odd)

    bound = seen.load(rows)
    longest = gl.max(bound, 0)
    key = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, mma))
    for j in range((longest + BLOCK - 1) // BLOCK):
        stage = j & 1
        start = j * BLOCK
        phase = (couples + (j >> 1)) & 1
        s0 = _product(q_latent, q_rope, k_latent, k_rope, latent_full, rope_full, stage, phase, zero, j * opaque_zero)
        s0 = warpgroup_mma_wait(0, deps=[s0])
        s0 = gl.where((start + key)[None, :] < bound[:, None], s0, float("-inf"))
        top, total = _softmax(s0, top, total, stage, buffers, FACTOR)
        if start + BLOCK > longest:
            _clean(k_latent, stage, longest - start)
        _publish(stage)
    some = (total > 0.0) & (bound != EMPTY)
    closing.index(0).store(gl.where(some, 1.0 / total, 0.0))
    closing.index(1).store(gl.where(some, (top + gl.log2(total)) * LN_2, float("-inf")))
    gl.thread_barrier()
    arrive(CLOSING)
    arrive(CLOSING + 1)


@gluon.jit
def _store(out, lse, line, scale, logs, pairs, stored, o0, o1, MMA: gl.constexpr, FIRST_CHUNK: gl.constexpr):
    pair = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, MMA))
    column = FIRST_CHUNK * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, MMA))
    if FIRST_CHUNK == 0:
        gl.store(lse + line + pair, logs, mask=pair < pairs)
    target = out + line.to(gl.int64) * LATENT + pair[:, None] * LATENT + column[None, :]
    # An empty row is selected to 0: it was not masked, and its query may hold anything.
    o0 = gl.where((scale > 0.0)[:, None], o0 * scale[:, None], 0.0)
    o1 = gl.where((scale > 0.0)[:, None], o1 * scale[:, None], 0.0)
    gl.store(target, o0.to(out.dtype.element_ty), mask=(pair < stored)[:, None])
    gl.store(target + CHUNK, o1.to(out.dtype.element_ty), mask=(pair < stored)[:, None])


@gluon.jit
def _values(buffers, barriers, plan, results, SPLIT: gl.constexpr, FIRST_CHUNK: gl.constexpr):
    _, _, k_latent, k_rope, rescale, closing = buffers
    _, _, latent_empty, _, rope_empty = barriers
    side: gl.constexpr = FIRST_CHUNK // 2
    _, blocks = plan
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    rows: gl.constexpr = gl.SliceLayout(1, mma)
    every: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])  # all factors in every warp
    o0 = gl.zeros([BLOCK, CHUNK], gl.float32, layout=mma)
    o1 = gl.zeros([BLOCK, CHUNK], gl.float32, layout=mma)
    for j in range(blocks):
        stage = j & 1
        i = stage * 4 + FIRST_CHUNK
        wait(RESCALE + 2 * side + stage)
        if gl.min(rescale.index(stage).load(every), 0) != 1.0:
            alpha = rescale.index(stage).load(rows)
            o0 = o0 * alpha[:, None]
            o1 = o1 * alpha[:, None]
        wait(P_READY + 2 * side + stage)
        t0 = warpgroup_mma(k_rope.index(stage), k_latent.index(i), o0, is_async=True)
        t1 = warpgroup_mma(k_rope.index(stage), k_latent.index(i + 1), o1, is_async=True)
        o0, t1 = warpgroup_mma_wait(1, deps=[t0, t1])
        # One thread arrives for all: a barrier has to bring them together first.
        gl.thread_barrier()
        mbarrier.arrive(latent_empty.index(i), count=1)
        o1 = warpgroup_mma_wait(0, deps=[t1])
        gl.thread_barrier()
        mbarrier.arrive(rope_empty.index(stage), count=1)
        mbarrier.arrive(latent_empty.index(i + 1), count=1)
    wait(CLOSING + side)
    scale = closing.index(0).load(rows)
    logs = closing.index(1).load(rows)
    out, lse, line, part_out, part_lse, part_line, pairs = results
    if SPLIT:
        if part_line < 0:
            _store(out, lse, line, scale, logs, pairs, pairs, o0, o1, mma, FIRST_CHUNK)
        else:  # the merge does not use the output of an empty part
            stored = gl.where(blocks > 0, pairs, 0)
            _store(part_out, part_lse, part_line, scale, logs, pairs, stored, o0, o1, mma, FIRST_CHUNK)
    else:
        _store(out, lse, line, scale, logs, pairs, pairs, o0, o1, mma, FIRST_CHUNK)


@gluon.jit
def values_low(buffers, barriers, plan, results, SPLIT: gl.constexpr):
    _values(buffers, barriers, plan, results, SPLIT, 0)


@gluon.jit
def values_high(buffers, barriers, plan, results, SPLIT: gl.constexpr):
    _values(buffers, barriers, plan, results, SPLIT, 2)
