# SPDX-License-Identifier: Apache-2.0
"""Partial MLA attention on Hopper: a warp-specialised Gluon kernel for latent 512 + rope 64.

One program takes 64 (row, head) pairs of one request and one split of its keys, 64 keys (a block) at a time. Four
partitions work on it: the *scores* warpgroup (S = Q K^T and the softmax), two *values* warpgroups (O += P V, half of
the latent columns each), and a producer warp that streams keys through TMA. They meet at mbarriers:

* A block occupies one of two stages: four chunks of 128 latent columns, and the rope columns. Each chunk has a barrier
  for "full" and one for "empty", so that scores start on the first chunk that arrives and a chunk is replaced as soon
  as its own values are done.
* Scores run over pairs of blocks: both products are issued, the softmax of the first hides behind the second product,
  that of the second behind the values of the first. Blocks that some row does not see in full follow one by one: the
  keys past a row's bound are masked, and the block that holds the last key of all is cleaned of what lies behind it,
  which may be NaN.
* P takes the place of the rope columns of its block, which are read no more. The factor by which O must be rescaled is
  published before P, so that the values warpgroups rescale while the exponentials are computed.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dcp_compile.errors import BackendError

from . import device
from .divide import MOST_WAVES, divide
from .merge import merge_into
from .merge_pieces import merge_pieces
from .splits import split_count

LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
BLOCK = gl.constexpr(64)  # keys per stage, and (row, head) pairs per program
CHUNK = gl.constexpr(128)
EMPTY = gl.constexpr(-(2**30))  # bound of a row that sees no key
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)

# 512 threads leave 128 registers each; the values warpgroups take some of the others'. More makes one of them spill.
_MAX_REGISTERS = 128
_VALUES_REGISTERS = gl.constexpr(160)


@gluon.jit
def _fetch(descriptor, line, column: gl.constexpr, width: gl.constexpr, full, empty, target, phase):
    mbarrier.wait(empty, phase)
    mbarrier.expect(full, BLOCK * width * 2)
    tma.async_copy_global_to_shared(descriptor, [line, column], full, target)


@gluon.jit
def _producer(keys, buffers, barriers, plan, PAGE: gl.constexpr):
    latent_keys, rope_keys, table_row, column_stride, page_lines = keys
    _, _, k_latent, k_rope, _, _ = buffers
    _, latent_full, latent_empty, rope_full, rope_empty, _, _, _ = barriers
    first, blocks = plan
    per_page: gl.constexpr = PAGE // BLOCK
    page = gl.load(table_row + first // per_page * column_stride, mask=blocks > 0, other=0)
    for j in range(blocks):
        stage = j & 1
        phase = ((j >> 1) & 1) ^ 1
        line = page * page_lines + (first + j) % per_page * BLOCK
        full, empty = rope_full.index(stage), rope_empty.index(stage)
        _fetch(rope_keys, line, LATENT, ROPE, full, empty, k_rope.index(stage), phase)
        following = first + j + 1
        page = gl.load(table_row + following // per_page * column_stride, mask=j + 1 < blocks, other=0)
        for half in gl.static_range(2):  # the values warpgroups start at chunks 0 and 2: serve these first
            for side in gl.static_range(2):
                i = stage * 4 + side * 2 + half
                _fetch(
                    latent_keys, line, (side * 2 + half) * CHUNK, CHUNK,
                    latent_full.index(i), latent_empty.index(i), k_latent.index(i), phase,
                )  # fmt: skip


@gluon.jit
def _product(q_latent, q_rope, k_latent, k_rope, latent_full, rope_full, stage, phase, zero, zero_index):
    """Issue S = Q K^T of one block, chunk by chunk as they arrive.

    ``zero_index`` is 0, but not provably so: the addresses of constant operands would all be kept in registers.
    """
    mbarrier.wait(rope_full.index(stage), phase)
    s = warpgroup_mma(q_rope, k_rope.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    for half in gl.static_range(2):
        for side in gl.static_range(2):
            i = stage * 4 + side * 2 + half
            mbarrier.wait(latent_full.index(i), phase)
            q = side * 2 + half
            if half == 1:
                q += zero_index
            s = warpgroup_mma(q_latent.index(q), k_latent.index(i).permute((1, 0)), s, is_async=True)
    return s


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
def _softmax(s, top, total, stage, buffers, barriers, FACTOR: gl.constexpr):
    """Publish the rescaling factor of one block and store its P; returns the running maximum (in log 2) and sum."""
    _, _, _, k_rope, rescale, _ = buffers
    _, _, _, _, _, rescale_full, _, _ = barriers
    new_top = gl.maximum(top, gl.max(s, 1) * FACTOR)
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)
    alpha = gl.exp2(top - shift)
    p = gl.exp2(s * FACTOR - shift[:, None])
    rescale.index(stage).store(alpha)
    gl.thread_barrier()
    mbarrier.arrive(rescale_full.index(stage), count=1)
    k_rope.index(stage).store(p.to(k_rope.dtype))
    return new_top, total * alpha + gl.sum(p, 1)


@gluon.jit
def _publish(p_full, stage):
    """Hand P, and what else was stored, to the values warpgroups."""
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(p_full.index(stage), count=1)


@gluon.jit
def _scores(buffers, barriers, couples, seen, opaque_zero, FACTOR: gl.constexpr):
    q_latent, q_rope, k_latent, k_rope, _, closing = buffers
    q_full, latent_full, _, rope_full, _, _, p_full, closing_full = barriers
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    rows: gl.constexpr = gl.SliceLayout(1, mma)
    top = gl.full([BLOCK], float("-inf"), gl.float32, layout=rows)
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
        top, total = _softmax(s0, top, total, even, buffers, barriers, FACTOR)
        _publish(p_full, even)
        s1 = warpgroup_mma_wait(0, deps=[s1])
        top, total = _softmax(s1, top, total, odd, buffers, barriers, FACTOR)
        _publish(p_full, odd)

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
        top, total = _softmax(s0, top, total, stage, buffers, barriers, FACTOR)
        if start + BLOCK > longest:
            _clean(k_latent, stage, longest - start)
        _publish(p_full, stage)
    some = (total > 0.0) & (bound != EMPTY)
    closing.index(0).store(gl.where(some, 1.0 / total, 0.0))
    closing.index(1).store(gl.where(some, (top + gl.log2(total)) * LN_2, float("-inf")))
    gl.thread_barrier()
    mbarrier.arrive(closing_full, count=1)


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
    _, _, latent_empty, _, rope_empty, rescale_full, p_full, closing_full = barriers
    _, blocks = plan
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    rows: gl.constexpr = gl.SliceLayout(1, mma)
    o0 = gl.zeros([BLOCK, CHUNK], gl.float32, layout=mma)
    o1 = gl.zeros([BLOCK, CHUNK], gl.float32, layout=mma)
    for j in range(blocks):
        stage = j & 1
        phase = (j >> 1) & 1
        i = stage * 4 + FIRST_CHUNK
        mbarrier.wait(rescale_full.index(stage), phase)
        alpha = rescale.index(stage).load(rows)
        o0 = o0 * alpha[:, None]
        o1 = o1 * alpha[:, None]
        mbarrier.wait(p_full.index(stage), phase)
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
    mbarrier.wait(closing_full, 0)
    scale = closing.index(0).load(rows)
    logs = closing.index(1).load(rows)
    out, lse, line, part_out, part_lse, part_line, pairs = results
    if SPLIT:
        if part_line < 0:
            _store(out, lse, line, scale, logs, pairs, pairs, o0, o1, mma, FIRST_CHUNK)
        else:  # the merge does not read the output of an empty part
            stored = gl.where(blocks > 0, pairs, 0)
            _store(part_out, part_lse, part_line, scale, logs, pairs, stored, o0, o1, mma, FIRST_CHUNK)
    else:
        _store(out, lse, line, scale, logs, pairs, pairs, o0, o1, mma, FIRST_CHUNK)


@gluon.jit
def _values_low(buffers, barriers, plan, results, SPLIT: gl.constexpr):
    _values(buffers, barriers, plan, results, SPLIT, 0)


@gluon.jit
def _values_high(buffers, barriers, plan, results, SPLIT: gl.constexpr):
    _values(buffers, barriers, plan, results, SPLIT, 2)


@gluon.jit(do_not_specialize=["page_lines", "table_stride", "opaque_zero"])
def _mla_hopper(
    q_latent_tiles,
    q_rope_tiles,
    latent_keys,
    rope_keys,
    block_table,
    bounds,
    programs,
    out,
    lse,
    part_out,
    part_lse,
    page_lines,
    table_stride,
    column_stride,
    opaque_zero,
    ROWS: gl.constexpr,  # per request
    BLOCK_ROWS: gl.constexpr,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    ROW_BOUNDS: gl.constexpr,
    SPLIT: gl.constexpr,  # results may be parts
    DIVIDED: gl.constexpr,  # the keys of each program are listed in ``programs``
    FACTOR: gl.constexpr,
    num_warps: gl.constexpr,
):
    pair0 = gl.program_id(0) * BLOCK  # programs next to each other share keys
    request = gl.program_id(2)
    if DIVIDED:
        programs += 4 * gl.program_id(1)
        request = gl.load(programs)
        if request < 0:
            return
    total_pairs: gl.constexpr = ROWS * HEADS
    pairs = gl.minimum(total_pairs - pair0, BLOCK)

    dtype: gl.constexpr = latent_keys.dtype
    tile: gl.constexpr = latent_keys.layout
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_latent = gl.allocate_shared_memory(dtype, [4, BLOCK, CHUNK], tile)
    q_rope = gl.allocate_shared_memory(dtype, [BLOCK, ROPE], rope_keys.layout)
    k_latent = gl.allocate_shared_memory(dtype, [8, BLOCK, CHUNK], tile)
    k_rope = gl.allocate_shared_memory(dtype, [2, BLOCK, ROPE], rope_keys.layout)
    rescale = gl.allocate_shared_memory(gl.float32, [2, BLOCK], flat)
    closing = gl.allocate_shared_memory(gl.float32, [2, BLOCK], flat)  # 1 / sum, and the log-sum-exp
    q_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    latent_full = gl.allocate_shared_memory(gl.int64, [8, 1], barrier)
    latent_empty = gl.allocate_shared_memory(gl.int64, [8, 1], barrier)
    rope_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    rope_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    rescale_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    closing_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    mbarrier.init(q_full, count=1)
    mbarrier.init(closing_full, count=1)
    for i in gl.static_range(2):
        mbarrier.init(rope_full.index(i), count=1)
        mbarrier.init(rope_empty.index(i), count=2)  # both values warpgroups read P there
        mbarrier.init(rescale_full.index(i), count=1)
        mbarrier.init(p_full.index(i), count=1)
    for i in gl.static_range(8):
        mbarrier.init(latent_full.index(i), count=1)
        mbarrier.init(latent_empty.index(i), count=1)
    fence_async_shared()
    # Lines past this request's pairs belong to the next one, or are zero past the end: nothing of them is stored.
    line = request * total_pairs + pair0
    mbarrier.expect(q_full, BLOCK * (LATENT + ROPE) * 2)
    tma.async_copy_global_to_shared(q_rope_tiles, [line, 0], q_full, q_rope)
    for c in gl.static_range(4):
        tma.async_copy_global_to_shared(q_latent_tiles, [line, c * CHUNK], q_full, q_latent.index(c))

    vector: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    pair = gl.arange(0, BLOCK, layout=vector)
    if ROW_BOUNDS:
        bounds += request * ROWS
        bound = gl.load(bounds + (pair0 + pair) // HEADS, mask=pair < pairs, other=0)
        row = gl.arange(0, BLOCK_ROWS, layout=vector)
        request_longest = gl.max(gl.load(bounds + row, mask=row < ROWS, other=0), 0)
    else:
        request_longest = gl.load(bounds + request)
        bound = gl.where(pair < pairs, request_longest, 0)
    longest = gl.max(bound, 0)
    shortest = gl.min(gl.where(bound > 0, bound, longest), 0)
    # Where keys are split follows the longest row of the request, so that it is the same for all its programs.
    if DIVIDED:
        first = gl.load(programs + 1)
        last = gl.load(programs + 2)
        part = gl.load(programs + 3)
    else:
        share = ((request_longest + BLOCK - 1) // BLOCK + gl.num_programs(1) - 1) // gl.num_programs(1)
        first = gl.program_id(1) * share
        last = first + share
        part = gl.program_id(1)
    blocks = gl.maximum(gl.minimum(last, (longest + BLOCK - 1) // BLOCK) - first, 0)
    # Pairs of blocks which every row that sees any key sees in full. The bounds within the blocks after them wait in
    # shared memory: the loop over the pairs has no register to spare.
    couples = gl.minimum(gl.maximum(shortest // BLOCK - first, 0), blocks) // 2
    rest = first + 2 * couples
    bound = gl.where(bound > 0, gl.minimum(bound, (first + blocks) * BLOCK) - rest * BLOCK, EMPTY)
    seen = gl.allocate_shared_memory(gl.int32, [BLOCK], flat, bound)

    keys = (latent_keys, rope_keys, block_table + request.to(gl.int64) * table_stride, column_stride, page_lines)
    buffers = (q_latent, q_rope, k_latent, k_rope, rescale, closing)
    barriers = (q_full, latent_full, latent_empty, rope_full, rope_empty, rescale_full, p_full, closing_full)
    plan = (first, blocks)
    results = (out, lse, line, part_out, part_lse, part * total_pairs + pair0, pairs)
    gl.warp_specialize(
        [
            (_scores, (buffers, barriers, couples, seen, opaque_zero, FACTOR)),
            (_values_low, (buffers, barriers, plan, results, SPLIT)),
            (_values_high, (buffers, barriers, plan, results, SPLIT)),
            (_producer, (keys, buffers, barriers, plan, PAGE)),
        ],
        [4, 4, 1],
        [_VALUES_REGISTERS, _VALUES_REGISTERS, 24],
    )


def _tiles(tensor: Tensor, columns: int) -> TensorDescriptor:
    """TMA descriptor of a ``[lines, width]`` tensor, read in tiles of 64 lines."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(tensor, [BLOCK.value, columns], layout)


def _lines(query: Tensor) -> Tensor:
    """Queries ``[T, H, width]`` as ``[T * H, width]`` lines that TMA can address; copies where strides forbid it."""
    lines = query.reshape(-1, query.shape[2])
    addressable = lines.stride(1) == 1 and lines.stride(0) % 8 == 0 and lines.data_ptr() % 16 == 0
    return lines if addressable else lines.clone(memory_format=torch.contiguous_format)


def _launch(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    bounds: Tensor,
    scale: float,
    row_bounds: bool,
    splits: int | None,
) -> tuple[Tensor, Tensor]:
    rows, heads, latent = q_latent.shape
    pages, page, width = kv_cache.shape
    batch = block_table.shape[0]
    page_stride, line_stride, unit = kv_cache.stride()
    if (latent, width) != (LATENT.value, LATENT.value + ROPE.value):
        raise BackendError(f"latent {latent} and rope {width - latent}: this kernel is for 512 and 64; use triton")
    if kv_cache.dtype != q_latent.dtype or kv_cache.dtype not in (torch.bfloat16, torch.float16):
        raise BackendError(f"queries {q_latent.dtype}, cache {kv_cache.dtype}: both must be bfloat16 or both float16")
    if page % BLOCK.value:
        raise BackendError(f"block_size {page} is not a multiple of {BLOCK.value}; choose one, or use triton")
    if unit != 1 or page_stride % line_stride or line_stride % 8 or kv_cache.data_ptr() % 16:
        raise BackendError(
            f"cache strides {kv_cache.stride()}: lines must be dense, 16-byte aligned, and pages whole lines apart"
        )
    if batch and rows % batch:
        raise BackendError(f"{rows} rows for {batch} requests: every request must have the same number of rows")

    out = q_latent.new_empty(q_latent.shape)
    lse = q_latent.new_empty((rows, heads), dtype=torch.float32)
    if rows * heads == 0:
        return out, lse
    tiles = triton.cdiv(rows // batch * heads, BLOCK.value)
    at_once = device.multiprocessors(q_latent.device)
    division, part_out, part_lse = None, out, lse
    if batch == 1:
        splits = splits or split_count(tiles, block_table.shape[1] * page, at_once)
        count = splits
    elif splits or tiles * batch < MOST_WAVES * at_once:
        at_once = splits * tiles if splits else at_once
        division = divide(bounds, batch, tiles, at_once, BLOCK.value)
        splits, count = len(division.programs), division.most_parts
    else:
        splits = count = 1
    if count > 1:
        part_out = out.new_empty((count, rows // batch, heads, latent), dtype=torch.float32)
        part_lse = lse.new_empty((count, rows // batch, heads))
    page_lines = page_stride // line_stride
    cache_lines = kv_cache.as_strided(((pages - 1) * page_lines + page, width), (line_stride, 1))
    q_latent, q_rope = _lines(q_latent), _lines(q_rope)
    _mla_hopper[(tiles, splits, batch if division is None else 1)](
        _tiles(q_latent, CHUNK.value),
        _tiles(q_rope, ROPE.value),
        _tiles(cache_lines, CHUNK.value),
        _tiles(cache_lines, ROPE.value),
        block_table,
        bounds,
        bounds if division is None else division.programs,
        out,
        lse,
        part_out,
        part_lse,
        page_lines,
        *block_table.stride(),
        0,
        ROWS=rows // batch,
        BLOCK_ROWS=triton.next_power_of_2(rows // batch),
        HEADS=heads,
        PAGE=page,
        ROW_BOUNDS=row_bounds,
        SPLIT=count > 1,
        DIVIDED=division is not None,
        FACTOR=scale * LOG2_E.value,
        num_warps=4,
        maxnreg=_MAX_REGISTERS,
    )
    if division is not None:
        merge_pieces(part_out, part_lse, division, out, lse)
    elif count > 1:
        merge_into(part_out, part_lse, out, lse)
    return out, lse


def mla_rows(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    requests: Tensor,
    bounds: Tensor,
    scale: float,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Launcher of ``dcp::mla_rows`` for steps whose requests all have T / B rows: row t attends ``[0, bounds[t])``.

    Args:
        q_latent: ``[T, H, 512]``. q_rope: ``[T, H, 64]``, bfloat16 or float16. Used in place if their rows and heads
            are evenly spaced, else copied.
        kv_cache: ``[pages, block_size, 576]`` in the same type, block_size a multiple of 64.
        block_table: ``[B, columns]`` int32. bounds: ``[T]`` int32.
        requests: ``[T]``, which must be ``t // (T / B)``: the layout of every step. It is not read.
        splits: programs that share the keys of a request if there is one, else about as many for all of them together;
            None chooses from the shapes.

    Returns:
        ``(out [T, H, 512] in the dtype of q_latent, lse [T, H] float32)``, natural logarithm; 0 and -inf for an empty
        row.

    Raises:
        BackendError: sizes, types or strides the kernel is not made for.
    """
    return _launch(q_latent, q_rope, kv_cache, block_table, bounds, scale, True, splits)


def mla_prefix(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    prefix_bounds: Tensor,
    scale: float,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Launcher of ``dcp::mla_prefix``: each of the T / B rows of request b attends ``[0, prefix_bounds[b])``.

    Arguments, results and errors are those of :func:`mla_rows`, with prefix_bounds ``[B]`` int32.
    """
    return _launch(q_latent, q_rope, kv_cache, block_table, prefix_bounds, scale, False, splits)
