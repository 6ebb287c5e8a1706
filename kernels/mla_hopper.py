# SPDX-License-Identifier: Apache-2.0
"""Partial MLA attention on Hopper: a warp-specialised Gluon kernel for latent 512 + rope 64.

One program takes 64 (row, head) pairs of one request and one split of its keys, 64 keys (a block) at a time. Four
partitions work on it: the *scores* warpgroup (S = Q K^T and the softmax), two *values* warpgroups (O += P V, half of
the latent columns each), and a producer warp that streams keys through TMA. Keys are handed over by mbarriers, what the
scores warpgroup works out by named barriers:

* A block occupies one of two stages: four chunks of 128 latent columns, and the rope columns. Each chunk has a barrier
  for "full" and one for "empty", so that scores start on the first chunk that arrives and a chunk is replaced as soon
  as its own values are done. The block after the two is prefetched into L2; one more would evict what others need.
* Scores run over pairs of blocks: both products are issued, the softmax of the first hides behind the second product,
  that of the second behind the values of the first. Blocks that some row does not see in full follow one by one: the
  keys past a row's bound are masked, and the block that holds the last key of all is cleaned of what lies behind it,
  which may be NaN.
* P takes the place of the rope columns of its block, which are read no more. The factor by which O must be rescaled is
  published before P, so that the values warpgroups rescale while the exponentials are computed; mostly it is 1, because
  P may exceed 1 by some powers of two before a row's maximum is renewed.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dcp_compile.errors import BackendError

from . import device
from .divide import divide, limits, own_piece
from .merge import merge_into
from .merge_pieces import merge_pieces
from .mla_hopper_partitions import BLOCK, CHUNK, EMPTY, LATENT, ROPE, producer, scores, values_high, values_low
from .splits import split_count

# 512 threads leave 128 registers each; the values warpgroups take some of the others'. More makes one of them spill.
_MAX_REGISTERS = 128
_VALUES_REGISTERS = gl.constexpr(160)


@gluon.jit(do_not_specialize=["page_lines", "table_stride", "batch", "most", "even", "opaque_zero"])
def _mla_hopper(
    q_latent_tiles,
    q_rope_tiles,
    latent_keys,
    rope_keys,
    kv_cache,
    block_table,
    bounds,
    parts,
    out,
    lse,
    part_out,
    part_lse,
    page_lines,
    table_stride,
    column_stride,
    batch,
    most,
    even,
    opaque_zero,
    ROWS: gl.constexpr,  # per request
    BLOCK_ROWS: gl.constexpr,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    SHARERS: gl.constexpr,  # programs that prefetch a block together
    ROW_BOUNDS: gl.constexpr,
    SPLIT: gl.constexpr,  # results may be parts
    DIVIDED: gl.constexpr,  # among the programs of axis 1 by lengths, see divide.py for what follows
    TILES: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK_B: gl.constexpr,
    FACTOR: gl.constexpr,
    num_warps: gl.constexpr,
):
    pair0 = gl.program_id(0) * BLOCK  # programs next to each other share keys
    request = gl.program_id(2)
    if DIVIDED:
        number = gl.program_id(1)
        blocks, whole, more, chunk = divide(
            bounds, batch, most, even, ROWS if ROW_BOUNDS else 1, BLOCK, TILES, WIDTH,
            BLOCK_B, BLOCK_ROWS if ROW_BOUNDS else 1, num_warps,
        )  # fmt: skip
        if number >= gl.sum(whole + more, 0):
            return
        writes_parts = (pair0 == 0) & (number == 0)
        request, first, last, part = own_piece(
            blocks, whole, more, chunk, batch, number, parts, writes_parts, BLOCK_B, num_warps
        )
    total_pairs: gl.constexpr = ROWS * HEADS
    pairs = gl.minimum(total_pairs - pair0, BLOCK)

    # Loaded here, used below: what lies between does not wait for them.
    sharing: gl.constexpr = HEADS if ROW_BOUNDS else total_pairs  # pairs with one bound
    count: gl.constexpr = ROWS if ROW_BOUNDS else 1
    vector: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    pair, row = gl.arange(0, BLOCK, layout=vector), gl.arange(0, BLOCK_ROWS, layout=vector)
    bounds += request * count
    bound = gl.load(bounds + (pair0 + pair) // sharing, mask=pair < pairs, other=0)
    request_bounds = gl.load(bounds + row, mask=row < count, other=0)

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
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(2):
        mbarrier.init(rope_full.index(i), count=1)
        mbarrier.init(rope_empty.index(i), count=2)  # both values warpgroups read P there
    for i in gl.static_range(8):
        mbarrier.init(latent_full.index(i), count=1)
        mbarrier.init(latent_empty.index(i), count=1)
    fence_async_shared()
    # Queries past this request's pairs arrive as zeros.
    mbarrier.expect(q_full, BLOCK * (LATENT + ROPE) * 2)
    target = q_rope._reinterpret(dtype, [1, BLOCK, ROPE], q_rope_tiles.layout)
    tma.async_copy_global_to_shared(q_rope_tiles, [request, pair0, 0], q_full, target)
    for c in gl.static_range(4):
        target = q_latent.index(c)._reinterpret(dtype, [1, BLOCK, CHUNK], q_latent_tiles.layout)
        tma.async_copy_global_to_shared(q_latent_tiles, [request, pair0, c * CHUNK], q_full, target)

    longest = gl.max(bound, 0)
    shortest = gl.min(gl.where(bound > 0, bound, longest), 0)
    # Where keys are split follows the longest row of the request, so that it is the same for all its programs.
    if not DIVIDED:
        share = ((gl.max(request_bounds, 0) + BLOCK - 1) // BLOCK + gl.num_programs(1) - 1) // gl.num_programs(1)
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

    table_row = block_table + request.to(gl.int64) * table_stride
    keys = (latent_keys, rope_keys, kv_cache, table_row, column_stride, page_lines)
    buffers = (q_latent, q_rope, k_latent, k_rope, rescale, closing)
    barriers = (q_full, latent_full, latent_empty, rope_full, rope_empty)
    plan = (first, blocks)
    line = request * total_pairs + pair0
    results = (out, lse, line, part_out, part_lse, part * total_pairs + pair0, pairs)
    # The partitions' arguments are handed over in the memory of the reductions above, which every warp must have read.
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (scores, (buffers, barriers, couples, seen, pairs, opaque_zero, FACTOR)),
            (values_low, (buffers, barriers, plan, results, SPLIT)),
            (values_high, (buffers, barriers, plan, results, SPLIT)),
            (producer, (keys, buffers, barriers, plan, PAGE, SHARERS)),
        ],
        [4, 4, 1],
        [_VALUES_REGISTERS, _VALUES_REGISTERS, 24],
    )


def _tiles(tensor: Tensor, columns: int) -> TensorDescriptor:
    """TMA descriptor of a ``[..., lines, width]`` tensor, read in tiles of 64 lines."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=tensor.dim())
    return TensorDescriptor.from_tensor(tensor, [1] * (tensor.dim() - 2) + [BLOCK.value, columns], layout)


def _lines(query: Tensor, batch: int) -> Tensor:
    """Queries ``[T, H, width]`` as ``[B, T / B * H, width]`` that TMA can address; copies where strides forbid it."""
    lines = query.reshape(-1, query.shape[2])
    stride, unit = lines.stride()
    addressable = unit == 1 and stride >= lines.shape[1] and stride % 8 == 0 and lines.data_ptr() % 16 == 0
    lines = lines if addressable else lines.clone(memory_format=torch.contiguous_format)
    return lines.unflatten(0, (batch, -1))


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
    if rows % batch if batch else rows:
        raise BackendError(f"{rows} rows for {batch} requests: every request must have the same number of rows")

    out = q_latent.new_empty(q_latent.shape)
    lse = q_latent.new_empty((rows, heads), dtype=torch.float32)
    if rows * heads == 0:
        return out, lse
    tiles = triton.cdiv(rows // batch * heads, BLOCK.value)
    at_once, capacity = device.multiprocessors(q_latent.device), block_table.shape[1] * page
    divided = batch > 1 and (splits is not None or tiles * batch < 2 * at_once)
    most = even = 1
    if divided:
        at_once = splits * tiles if splits else at_once
        most, even = limits(batch, tiles, capacity, at_once)
        splits = most + batch
    elif batch == 1:
        splits = splits or split_count(tiles, capacity, at_once)
    else:
        splits = 1  # there are programs enough
    parts, part_out, part_lse = bounds, out, lse
    if splits > 1:
        parts = bounds.new_empty((batch, 2))
        part_out = out.new_empty((splits, rows // batch, heads, latent), dtype=torch.float32)
        part_lse = lse.new_empty((splits, rows // batch, heads))
    # One program alone per key waits for memory, not for its latency: prefetching takes it longer. A block of lines that
    # are not dense has no single address range.
    sharers = 2 if tiles > 1 and line_stride == width else 0
    page_lines = page_stride // line_stride
    cache_lines = kv_cache.as_strided(((pages - 1) * page_lines + page, width), (line_stride, 1))
    q_latent, q_rope = _lines(q_latent, batch), _lines(q_rope, batch)
    _mla_hopper[(tiles, splits, 1 if divided else batch)](
        _tiles(q_latent, CHUNK.value),
        _tiles(q_rope, ROPE.value),
        _tiles(cache_lines, CHUNK.value),
        _tiles(cache_lines, ROPE.value),
        kv_cache,
        block_table,
        bounds,
        parts,
        out,
        lse,
        part_out,
        part_lse,
        page_lines,
        *block_table.stride(),
        batch,
        most,
        even,
        0,
        ROWS=rows // batch,
        BLOCK_ROWS=triton.next_power_of_2(rows // batch),
        HEADS=heads,
        PAGE=page,
        SHARERS=sharers,
        ROW_BOUNDS=row_bounds,
        SPLIT=splits > 1,
        DIVIDED=divided,
        TILES=tiles,
        WIDTH=at_once,
        BLOCK_B=triton.next_power_of_2(batch),
        FACTOR=scale * math.log2(math.e),
        num_warps=4,
        maxnreg=_MAX_REGISTERS,
    )
    if divided:
        merge_pieces(part_out, part_lse, parts, out, lse)
    elif splits > 1:
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
