# SPDX-License-Identifier: Apache-2.0
"""A verify step of Kimi delta attention in one Gluon launch, for states of 128 x 128 and the like.

The mathematics are those of :mod:`.kda_verify`. One program takes a request's head. It asks for the first tile of the state,
and while that is on its way works out what only depends on keys, queries and decays, into shared memory: the decayed rows,
the weights of the pending records, and the products between the rows. Then it streams the state through registers, a few
numbers of every column at a time and two tiles ahead, each of its threads having whole columns.

Shared memory is what this kernel needs Gluon for. All threads read the same vectors at every tile; as loads from global
memory they come back in order, which is after the tiles of the state that were asked for before them.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dcp_compile.ops.kda import L2_EPS
from dcp_compile.ops.slots import check_pending

from .device import hopper_unavailable, multiprocessors

EPS = gl.constexpr(L2_EPS)
TILE = gl.constexpr(8)  # numbers of a column at a time: one 32-byte sector of every vector
SIZES = (32, 64, 128)  # of keys and values
MOST_ROWS = 8  # of this step and pending: more do not fit into registers


@gluon.jit
def _total(x):
    return gl.sum(gl.sum(x, 1), 0)


@gluon.jit
def _normalised(x, valid, L2NORM: gl.constexpr):
    """x, or x / sqrt(sum x^2 + eps); 0 for a padded row, whatever it holds."""
    x = gl.where(valid, x.to(gl.float32), 0.0)
    if L2NORM:
        x = x / gl.sqrt(_total(x * x) + EPS)
    return x


@gluon.jit
def _kda_verify_hopper(
    q,
    k,
    v,
    g,
    beta,
    state,
    pending_k,
    pending_u,
    pending_g,
    accepted,
    state_slots,
    positions,
    out,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    g_stride_b,
    g_stride_s,
    g_stride_h,
    beta_stride_b,
    beta_stride_s,
    beta_stride_h,
    state_stride_n,
    state_stride_h,
    state_stride_k,
    pk_stride_n,
    pk_stride_m,
    pk_stride_h,
    pu_stride_n,
    pu_stride_m,
    pu_stride_h,
    pg_stride_n,
    pg_stride_m,
    pg_stride_h,
    accepted_stride,
    slot_stride,
    position_stride_b,
    position_stride_s,
    SCALE: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    ROWS: gl.constexpr,
    RECORDS: gl.constexpr,
    SPAN: gl.constexpr,  # a power of two of at least ROWS
    L2NORM: gl.constexpr,
    num_warps: gl.constexpr,
):
    head = gl.program_id(0).to(gl.int64)
    request = gl.program_id(1).to(gl.int64)
    heads = gl.num_programs(0)
    slot = gl.load(state_slots + request * slot_stride).to(gl.int64)
    held = slot >= 0
    kept = gl.where(held, gl.minimum(gl.load(accepted + request * accepted_stride), RECORDS), 0)

    tile: gl.constexpr = gl.BlockedLayout([V // (32 * num_warps), TILE], [32, 1], [num_warps, 1], [0, 1])
    columns: gl.constexpr = gl.SliceLayout(1, tile)
    along: gl.constexpr = gl.SliceLayout(0, tile)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    plane: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    VECTORS: gl.constexpr = 1 + RECORDS + 2 * ROWS
    j = gl.arange(0, V, layout=columns)
    state += slot * state_stride_n + head * state_stride_h
    places = j[:, None] + gl.arange(0, TILE, layout=along)[None, :] * state_stride_k
    step = TILE * state_stride_k
    inside = gl.full([V, TILE], held, gl.int1, tile)
    ahead = gl.load(state + places, mask=inside, other=0.0)

    TILES: gl.constexpr = K // TILE
    spread: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [1, num_warps], [1, 0])  # every warp has whole vectors
    tiles = gl.arange(0, TILES, layout=gl.SliceLayout(1, spread))
    i = tiles[:, None] * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, spread))[None, :]
    pending_k += slot * pk_stride_n + head * pk_stride_h + i
    pending_g += slot * pg_stride_n + head * pg_stride_h + i
    old_keys, old_decays = (), ()
    for m in gl.static_range(RECORDS):
        there = gl.full([TILES, TILE], m < kept, gl.int1, spread)
        old_keys += (gl.load(pending_k + m * pk_stride_m, mask=there, other=0.0),)
        old_decays += (gl.load(pending_g + m * pg_stride_m, mask=there, other=0.0),)

    q += request * q_stride_b + head * q_stride_h + i
    k += request * k_stride_b + head * k_stride_h + i
    g += request * g_stride_b + head * g_stride_h + i
    v += request * v_stride_b + head * v_stride_h + j
    beta += request * beta_stride_b + head * beta_stride_h
    positions += request * position_stride_b
    queries, keys, decays, news, betas, valids = (), (), (), (), (), ()
    for row in gl.static_range(ROWS):
        queries += (gl.load(q + row * q_stride_s),)
        keys += (gl.load(k + row * k_stride_s),)
        decays += (gl.load(g + row * g_stride_s),)
        news += (gl.load(v + row * v_stride_s),)
        betas += (gl.load(beta + row * beta_stride_s),)
        valids += (gl.load(positions + row * position_stride_s) >= 0,)

    vectors = gl.allocate_shared_memory(gl.float32, [VECTORS, TILES, TILE], plane)
    gl.thread_barrier()  # every thread has read the records before any is replaced
    nothing = gl.zeros([TILES, TILE], gl.float32, spread)
    since = nothing
    for m in gl.static_range(RECORDS - 1, -1, -1):
        vectors.index(1 + m).store(old_keys[m] * gl.exp(since))
        since = since + old_decays[m]
    vectors.index(0).store(gl.exp(since))

    # Row r: L_r0 .. L_r,r-1, beta_r; from SPAN on M_r0 .. M_rr. One row more, as memory of size 0 cannot be had.
    products = gl.allocate_shared_memory(gl.float32, [ROWS + 1, 2 * SPAN], flat)
    values = gl.allocate_shared_memory(gl.float32, [ROWS + 1, V], flat)
    single: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    place = gl.arange(0, 2 * SPAN, layout=single)
    writable = gl.full([TILES, TILE], held, gl.int1, spread)
    reaches = ()  # the keys of the rows so far, decayed up to this one
    since = nothing
    for row in gl.static_range(ROWS):
        valid = valids[row]
        query = _normalised(queries[row], valid, L2NORM) * SCALE
        key = _normalised(keys[row], valid, L2NORM)
        decay = gl.where(valid, decays[row].to(gl.float32), 0.0)
        gl.store(pending_k + row * pk_stride_m, key, mask=writable)
        gl.store(pending_g + row * pg_stride_m, decay, mask=writable)
        since = since + decay
        fade = gl.exp(since)
        vectors.index(1 + RECORDS + row).store(key * fade)
        vectors.index(1 + RECORDS + ROWS + row).store(query * fade)
        values.index(row).store(gl.where(valid, news[row].to(gl.float32), 0.0))
        strength = gl.where(valid, betas[row].to(gl.float32), 0.0)
        product = gl.where(place == row, strength, gl.where(place == SPAN + row, _total(query * key), 0.0))
        fade = gl.exp(decay)
        earlier, reaches = reaches, ()
        for s in gl.static_range(row):
            reach = earlier[s] * fade
            product = gl.where(place == s, _total(key * reach), product)
            product = gl.where(place == SPAN + s, _total(query * reach), product)
            reaches += (reach,)
        reaches += (key,)
        products.index(row).store(product)
    for row in gl.static_range(ROWS, RECORDS):  # a narrower step leaves neutral records behind
        gl.store(pending_k + row * pk_stride_m, nothing, mask=writable)
        gl.store(pending_g + row * pg_stride_m, nothing, mask=writable)

    further = gl.load(state + places + step, mask=inside, other=0.0)
    pending_u += slot * pu_stride_n + head * pu_stride_h + j
    u_old = ()
    for m in gl.static_range(RECORDS):
        there = gl.full([V], m < kept, gl.int1, columns)
        u_old += (gl.load(pending_u + m * pu_stride_m, mask=there, other=0.0),)
    empty = gl.zeros([V], gl.float32, columns)
    from_state, to_out = (), ()
    for _ in gl.static_range(ROWS):
        from_state += (empty,)
        to_out += (empty,)
    lines = vectors._reinterpret(gl.float32, [VECTORS * TILES, TILE], flat)
    changed = gl.full([V, TILE], kept > 0, gl.int1, tile)
    for t in range(TILES):
        block = ahead * lines.index(t).load(along)[None, :]
        ahead = further
        inside = gl.full([V, TILE], held & (t + 2 < TILES), gl.int1, tile)
        further = gl.load(state + places + (t + 2) * step, mask=inside, other=0.0)
        for m in gl.static_range(RECORDS):
            block += u_old[m][:, None] * lines.index((1 + m) * TILES + t).load(along)[None, :]
        so_far, from_state = from_state, ()
        for row in gl.static_range(ROWS):
            line = lines.index((1 + RECORDS + row) * TILES + t).load(along)
            from_state += (so_far[row] + gl.sum(block * line[None, :], 1),)
        so_far, to_out = to_out, ()
        for row in gl.static_range(ROWS):
            line = lines.index((1 + RECORDS + ROWS + row) * TILES + t).load(along)
            to_out += (so_far[row] + gl.sum(block * line[None, :], 1),)
        gl.store(state + places + t * step, block, mask=changed)

    out += (request * ROWS * heads + head) * V + j
    factors = products._reinterpret(gl.float32, [(ROWS + 1) * 2 * SPAN, 1], flat)
    corrections, outputs = (), ()
    for row in gl.static_range(ROWS):
        first = row * 2 * SPAN
        u = values.index(row).load(columns) - from_state[row]
        o = to_out[row]
        for s in gl.static_range(row):
            u -= factors.index(first + s).load(columns) * corrections[s]
            o += factors.index(first + SPAN + s).load(columns) * corrections[s]
        u *= factors.index(first + row).load(columns)
        o += factors.index(first + SPAN + row).load(columns) * u
        corrections += (u,)
        outputs += (o,)
    kept_column = gl.full([V], held, gl.int1, columns)
    for row in gl.static_range(ROWS):
        gl.store(out + row * heads * V, outputs[row].to(out.dtype.element_ty))
        gl.store(pending_u + row * pu_stride_m, corrections[row], mask=kept_column)
    for row in gl.static_range(ROWS, RECORDS):
        gl.store(pending_u + row * pu_stride_m, empty, mask=kept_column)


def _warps(programs: int, values: int, width: int) -> int:
    """Warps of a program. Programs that have a multiprocessor each are faster with several, with fewer columns per thread;
    where several share one, those would only read the vectors more often."""
    return min(4, values // 32) if programs <= width else 1


def fits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    pending_k: Tensor,
    pending_u: Tensor,
    pending_g: Tensor,
) -> bool:
    """Whether this kernel can run such a step on this machine: sizes in SIZES, at most MOST_ROWS rows and records, and
    numbers of a head next to each other."""
    records, dense = pending_k.shape[1], (q, k, v, g, state, pending_k, pending_u, pending_g)
    return (
        hopper_unavailable(q.device) is None
        and k.shape[3] in SIZES
        and v.shape[3] in SIZES
        and records <= MOST_ROWS
        and all(tensor.stride(-1) == 1 for tensor in dense)
    )


def kda_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    pending_k: Tensor,
    pending_u: Tensor,
    pending_g: Tensor,
    accepted: Tensor,
    state_slots: Tensor,
    positions: Tensor,
    scale: float,
    qk_l2norm: bool,
) -> Tensor:
    """Launcher of ``dcp::kda_verify`` for tensors that :func:`fits`; arguments, result and errors are those of
    :func:`.kda_verify.kda_verify`."""
    batch, rows, heads, width = q.shape
    values, records = v.shape[3], pending_k.shape[1]
    check_pending(rows, records)
    out = v.new_empty(v.shape)
    if batch * heads == 0:
        return out
    _kda_verify_hopper[(heads, batch)](
        q,
        k,
        v,
        g,
        beta,
        state,
        pending_k,
        pending_u,
        pending_g,
        accepted,
        state_slots,
        positions,
        out,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *g.stride()[:3],
        *beta.stride(),
        *state.stride()[:3],
        *pending_k.stride()[:3],
        *pending_u.stride()[:3],
        *pending_g.stride()[:3],
        accepted.stride(0),
        state_slots.stride(0),
        *positions.stride(),
        SCALE=scale,
        K=width,
        V=values,
        ROWS=rows,
        RECORDS=records,
        SPAN=triton.next_power_of_2(max(rows, 1)),
        L2NORM=qk_l2norm,
        num_warps=_warps(batch * heads, values, multiprocessors(q.device)),
    )
    return out
