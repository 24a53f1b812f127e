"""Gradients of attention on Hopper: two kernels of TMA and WGMMA, without atomics.

With P = exp(S - lse), dP = dout v^T and dS = P (dP - delta), delta = rowsum(dout out) -
dlse, as in FlashAttention-2 (https://arxiv.org/abs/2307.08691):

    dv = P^T dout,    dk = scale dS^T q,    dq = scale dS k

One kernel holds keys and values and walks over the queries that see them, through all
heads of the group; it computes S and dP transposed, so that P^T and dS^T are in the
registers in which WGMMA takes them. The other holds queries and walks over their keys.
Each has a loader and two consumers of 64 rows, as the forward kernel; one consumer's
exponentials lie under the products of the other.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.attention.flash_attention import (
    CACHED_BYTES,
    ROWS,
    WGMMA,
    Problem,
    by_row,
    copyable,
    int32,
    key_blocks,
    padded_rows,
    place,
    position_and_length,
    problem,
    tiled,
    unsupported,
)
from jaxkern.pallas.attention.pairs import (
    BY_COLUMN,
    BY_ROW,
    LOG2_E,
    bias_tile,
    inside_both,
    is_set,
    mask_words,
    whole_blocks,
    word_bounds,
)
from jaxkern.primitives.attention.attention import without_rest
from jaxkern.triton.attention.flash_attention import (
    segment_bounds,
    with_bias_gradient,
)
from jaxkern.triton.attention.flash_attention import slower as slower_than_xla

BLOCK = 64  # rows of the matrices that are walked over
CONSUMERS = 2
KEYS = CONSUMERS * ROWS  # of a program that holds keys
STAGES = 2
FASTER = {(64, 64), (96, 96), (128, 128)}  # than Triton, measured
MEASURED = 1024  # queries of the shortest sequence that was measured


def unsupported_bwd(query: Any, value: Any, **rest: Any) -> str | None:
    """A reason in words, or None."""
    if reason := unsupported(query=query, value=value, **rest):
        return reason
    if max(query.shape[3], value.shape[3]) > 128:
        return f"head dims {query.shape[3]} and {value.shape[3]} are above 128"
    return None


def slower_bwd(
    query: Any, key: Any, value: Any, bias: Any = None, **_: Any
) -> str | None:
    """Why "auto" leaves the gradients to the next row, or None."""
    if (query.shape[3], value.shape[3]) not in FASTER:
        dims = f"head dims {query.shape[3]} and {value.shape[3]}"
        return f"no gain was measured at {dims}"
    if query.shape[1] < MEASURED:
        return f"fewer than {MEASURED} queries were not measured"
    if bias is not None:
        return "with a `bias` it is slower than Triton's, 0.96 times"
    return slower_than_xla(query, key)


def place_keys(index, c: Problem):
    """(batch, key head, block of keys) of a program, by sections of heads.

    Of so many heads that their queries and cotangents fit the cache.
    """
    heads = c.b * (c.n // c.group)
    blocks = -(-c.s // KEYS)
    cached = max(1, CACHED_BYTES // (2 * c.t * c.group * (c.h + c.hv)))
    section = min(cached, heads)
    part = lax.div(index, jnp.int32(section * blocks))
    within = lax.rem(index, jnp.int32(section * blocks))
    present = lax.min(section, heads - part * section)
    head = part * section + lax.rem(within, present)
    kv_heads = jnp.int32(c.n // c.group)
    # the first blocks see the most queries
    return lax.div(head, kv_heads), lax.rem(head, kv_heads), lax.div(within, present)


def in_order(first, whole, whole_end, last):
    """The same blocks with first <= whole <= whole_end <= last."""
    last = lax.max(first, last)
    whole = lax.min(lax.max(whole, first), last)
    return first, whole, lax.max(lax.min(whole_end, last), whole), last


def query_blocks(batch, block, lengths_ref, offset_ref, bounds_ref, c: Problem):
    """The blocks of queries that see some of the keys: [first, last).

    Of these [whole, whole_end) see all keys of the block.
    """
    offset, length = position_and_length(batch, lengths_ref, offset_ref, c)
    column = block * KEYS
    end = -(-c.t // BLOCK) * BLOCK  # rows behind t have no weights
    start, stop, whole_start, whole_stop = 0, end, 0, end
    if c.causal:
        start = column - offset
        whole_start = start + KEYS - 1
    if c.window is not None:
        stop = lax.min(end, column + KEYS - 1 + c.window - offset)
        whole_stop = lax.min(end, column + c.window - offset)
    stop = jnp.where(column < length, stop, 0)
    whole_stop = jnp.where(column + KEYS <= length, whole_stop, 0)

    def blocks(row, round_up=0):
        row = lax.max(jnp.int32(0), jnp.int32(row)) + round_up * (BLOCK - 1)
        return lax.div(row, jnp.int32(BLOCK))

    first, last = blocks(start), blocks(stop, 1)
    whole, whole_end = blocks(whole_start, 1), blocks(whole_stop)
    if bounds_ref is not None:
        first = lax.max(first, bounds_ref[batch, block, 0])
        whole = lax.max(whole, bounds_ref[batch, block, 1])
        whole_end = lax.min(whole_end, bounds_ref[batch, block, 2])
        last = lax.min(last, bounds_ref[batch, block, 3])
    return in_order(first, whole, whole_end, last)


def walk(step, carry, blocks, begins: bool, ends: bool):
    """step(j, carry, masked) for all blocks; only those at the ends are masked."""
    first, whole, whole_end, last = blocks
    masked = functools.partial(step, masked=True)
    if begins:
        carry = lax.fori_loop(first, whole, masked, carry)
    plain = functools.partial(step, masked=False)
    carry = lax.fori_loop(whole, whole_end, plain, carry)
    if ends:
        carry = lax.fori_loop(whole_end, last, masked, carry)
    return carry


def visible(shape, key_axis, first_key, first_query, offset, length, c: Problem):
    """Which pairs of a block see each other, segments aside."""

    def iota(axis):
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)

    keys = iota(key_axis)
    seen = keys < length - first_key
    ahead = keys - iota(1 - key_axis)
    position = first_query + offset - first_key
    if c.causal:
        seen = jnp.logical_and(seen, ahead <= position)
    if c.window is not None:
        seen = jnp.logical_and(seen, ahead > position - c.window)
    return seen


def same_ids(row_ids, column_ids_ref, shape):
    columns = plgpu.load(column_ids_ref, layout=BY_COLUMN, optimized=False)
    return by_row(row_ids, shape) == by_column(columns, shape)


def exponents(s, bias, lse2, c: Problem):
    """(log2 of the weights, tanh of the cap or None)."""
    bent = None
    z = s * c.scale
    if c.softcap is not None:
        bent = jnp.exp2(s * (2 * LOG2_E * c.scale / c.softcap))
        bent = 1.0 - 2.0 / (1.0 + bent)
        z = bent * (c.softcap * LOG2_E)
    if bias is not None:
        z = z + bias
    return z - lse2, bent


def weights(s, bias, lse2, seen, c: Problem):
    """(P, tanh of the cap), with `seen` None where all pairs see each other."""
    z, bent = exponents(s, bias, lse2, c)
    if seen is not None:
        z = jnp.where(seen, z, -jnp.inf)
    return jnp.exp2(z), bent


def slopes(p, dp, delta, bent):
    """dS."""
    ds = p * (dp - delta)
    return ds if bent is None else ds * (1.0 - bent * bent)


def dot(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def dscale(c: Problem) -> float:
    """The scale, which `c.scale` is times log2 e where no cap comes after it."""
    return c.scale if c.softcap is not None else c.scale / LOG2_E


def by_column(x, shape):
    return lax.broadcast_in_dim(x, shape, [1])


def two_products(a, b, c, d):
    """a b and c d; all in shared memory."""

    def scoped(ab_ref, cd_ref):
        plgpu.wgmma(ab_ref, a, b)
        plgpu.wgmma(cd_ref, c, d)
        return plgpu.wgmma_accumulator_load(ab_ref, wait_n=1), cd_ref[...]

    shape = plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32)
    return pl.run_scoped(scoped, shape, shape)


def accumulated(sums, products, interpret):
    """sums[i] + a b, for each (a, b) of products; a in registers."""
    if interpret:  # which has no accumulators that start from values
        return [
            x + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
            for x, (a, b) in zip(sums, products, strict=True)
        ]

    def scoped(*refs):
        for ref, x in zip(refs, sums, strict=True):
            ref[...] = x
        for ref, (a, b) in zip(refs, products, strict=True):
            plgpu.wgmma(ref, a, b)
        return [ref[...] for ref in refs]

    return pl.run_scoped(
        scoped, *(plgpu.WGMMAAccumulatorRef(x.shape, jnp.float32) for x in sums)
    )


def zeros(shape):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)


def keys_kernel(
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse2_ref,
    delta_ref,
    q_ids_ref,
    kv_ids_ref,
    bias_ref,
    words_ref,
    bounds_ref,
    lengths_ref,
    offset_ref,
    dk_ref,
    dv_ref,
    buffers,
    barriers,
    *,
    c: Problem,
    interpret: bool,
):
    k_smem, v_smem, q_smem, dout_smem, lse2_smem, delta_smem = buffers
    held, full, free = barriers
    me = lax.axis_index("warpgroup")
    batch, kv_head, block = place_keys(lax.axis_index("program"), c)
    blocks = query_blocks(batch, block, lengths_ref, offset_ref, bounds_ref, c)
    first, _, _, last = blocks
    count = last - first

    @pl.when(me == CONSUMERS)
    def load():
        plgpu.set_max_registers(24, action="decrease")
        for w in range(CONSUMERS):
            rows = pl.ds((block * CONSUMERS + w) * ROWS, ROWS)
            for source, target in ((k_ref, k_smem), (v_ref, v_smem)):
                plgpu.copy_gmem_to_smem(
                    source.at[batch, rows, kv_head], target.at[w], held.at[w]
                )

        def step(j, _):
            head = kv_head * c.group + lax.div(j, count)
            slot = lax.rem(j, jnp.int32(STAGES))
            rows = pl.ds((first + lax.rem(j, count)) * BLOCK, BLOCK)
            plgpu.barrier_wait(free.at[slot])
            for source, target in ((q_ref, q_smem), (dout_ref, dout_smem)):
                plgpu.copy_gmem_to_smem(
                    source.at[batch, rows, head], target.at[slot], full.at[slot]
                )
            for source, target in ((lse2_ref, lse2_smem), (delta_ref, delta_smem)):
                plgpu.copy_gmem_to_smem(
                    source.at[batch, head, rows], target.at[slot], full.at[slot]
                )

        lax.fori_loop(0, count * c.group, step, None)
        for slot in range(STAGES):
            plgpu.barrier_wait(free.at[slot])

    @pl.when(me < CONSUMERS)
    def differentiate():
        plgpu.set_max_registers(240, action="increase")
        for slot in range(STAGES):
            plgpu.barrier_arrive(free.at[slot])
        plgpu.barrier_wait(held.at[me])
        offset, length = position_and_length(batch, lengths_ref, offset_ref, c)
        row = (block * CONSUMERS + me) * ROWS
        kv_ids = None
        if kv_ids_ref is not None:
            ids = kv_ids_ref.at[batch, pl.ds(row, ROWS)]
            kv_ids = plgpu.load(ids, layout=BY_ROW, optimized=False)

        def step(j, sums, masked, member):
            slot = lax.rem(member * count + j - first, jnp.int32(STAGES))
            plgpu.barrier_wait(full.at[slot])
            q, dout = q_smem.at[slot], dout_smem.at[slot]
            s, dp = two_products(
                k_smem.at[me],
                q.transpose((1, 0)),
                v_smem.at[me],
                dout.transpose((1, 0)),
            )
            lse2 = plgpu.load(lse2_smem.at[slot], layout=BY_COLUMN)
            delta = plgpu.load(delta_smem.at[slot], layout=BY_COLUMN)
            seen = bias = None
            query, n = j * BLOCK, kv_head * c.group + member
            if bias_ref is not None:
                bias = bias_tile(bias_ref, batch, n, row, query, s.shape)
            if masked:
                seen = visible(s.shape, 0, row, query, offset, length, c)
                if kv_ids is not None:
                    ids = q_ids_ref.at[batch, pl.ds(query, BLOCK)]
                    seen = jnp.logical_and(seen, same_ids(kv_ids, ids, s.shape))
                if words_ref is not None:
                    bits = is_set(words_ref, batch, n, row, query, s.shape)
                    seen = jnp.logical_and(seen, bits)
            p, bent = weights(s, bias, by_column(lse2, s.shape), seen, c)
            ds = slopes(p, dp, by_column(delta, s.shape), bent)
            dtype = q_ref.dtype
            sums = accumulated(
                sums, [(p.astype(dtype), dout), (ds.astype(dtype), q)], interpret
            )
            plgpu.barrier_arrive(free.at[slot])
            return sums

        def head(member, sums):
            ragged = lengths_ref is not None or c.s % KEYS != 0
            bounded = bounds_ref is not None
            return walk(
                functools.partial(step, member=member),
                sums,
                blocks,
                begins=c.causal or bounded,
                ends=ragged or c.window is not None or bounded,
            )

        start = [zeros((ROWS, c.hv)), zeros((ROWS, c.h))]
        dv, dk = lax.fori_loop(0, c.group, head, start)
        for x, staged, target in (
            (dk * dscale(c), k_smem, dk_ref),
            (dv, v_smem, dv_ref),
        ):
            staged.at[me][...] = x.astype(target.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                staged.at[me], target.at[batch, pl.ds(row, ROWS), kv_head]
            )
        plgpu.wait_smem_to_gmem(0)


def queries_kernel(
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse2_ref,
    delta_ref,
    q_ids_ref,
    kv_ids_ref,
    bias_ref,
    words_ref,
    bounds_ref,
    lengths_ref,
    offset_ref,
    dq_ref,
    buffers,
    barriers,
    *,
    c: Problem,
    interpret: bool,
):
    q_smem, dout_smem, k_smem, v_smem = buffers
    held, full, free = barriers
    me = lax.axis_index("warpgroup")
    batch, head, block = place(lax.axis_index("program"), c)
    blocks = in_order(*key_blocks(batch, block, lengths_ref, offset_ref, bounds_ref, c))
    first, _, _, last = blocks

    @pl.when(me == CONSUMERS)
    def load():
        plgpu.set_max_registers(24, action="decrease")
        for w in range(CONSUMERS):
            rows = pl.ds((block * CONSUMERS + w) * ROWS, ROWS)
            for source, target in ((q_ref, q_smem), (dout_ref, dout_smem)):
                plgpu.copy_gmem_to_smem(
                    source.at[batch, rows, head], target.at[w], held.at[w]
                )

        def step(j, _):
            slot = lax.rem(j, jnp.int32(STAGES))
            keys = pl.ds((first + j) * c.block_k, c.block_k)
            plgpu.barrier_wait(free.at[slot])
            for source, target in ((k_ref, k_smem), (v_ref, v_smem)):
                plgpu.copy_gmem_to_smem(
                    source.at[batch, keys, lax.div(head, jnp.int32(c.group))],
                    target.at[slot],
                    full.at[slot],
                )

        lax.fori_loop(0, last - first, step, None)
        for slot in range(STAGES):
            plgpu.barrier_wait(free.at[slot])

    @pl.when(me < CONSUMERS)
    def differentiate():
        plgpu.set_max_registers(240, action="increase")
        for slot in range(STAGES):
            plgpu.barrier_arrive(free.at[slot])
        offset, length = position_and_length(batch, lengths_ref, offset_ref, c)
        row = (block * CONSUMERS + me) * ROWS
        rows = pl.ds(row, ROWS)
        lse2, delta = (
            plgpu.load(x.at[batch, head, rows], layout=BY_ROW, optimized=False)
            for x in (lse2_ref, delta_ref)
        )
        plgpu.barrier_wait(held.at[me])

        q_ids = None
        if q_ids_ref is not None:
            ids = q_ids_ref.at[batch, rows]
            q_ids = plgpu.load(ids, layout=BY_ROW, optimized=False)

        def step(j, dq, masked):
            slot = lax.rem(j - first, jnp.int32(STAGES))
            plgpu.barrier_wait(full.at[slot])
            k, v = k_smem.at[slot], v_smem.at[slot]
            s, dp = two_products(
                q_smem.at[me],
                k.transpose((1, 0)),
                dout_smem.at[me],
                v.transpose((1, 0)),
            )
            seen = bias = None
            key = j * c.block_k
            if bias_ref is not None:
                bias = bias_tile(bias_ref, batch, head, row, key, s.shape)
            if masked:
                seen = visible(s.shape, 1, key, row, offset, length, c)
                if q_ids is not None:
                    ids = kv_ids_ref.at[batch, pl.ds(key, c.block_k)]
                    seen = jnp.logical_and(seen, same_ids(q_ids, ids, s.shape))
                if words_ref is not None:
                    bits = is_set(words_ref, batch, head, row, key, s.shape)
                    seen = jnp.logical_and(seen, bits)
            p, bent = weights(s, bias, by_row(lse2, s.shape), seen, c)
            ds = slopes(p, dp, by_row(delta, s.shape), bent)
            (dq,) = accumulated([dq], [(ds.astype(q_ref.dtype), k)], interpret)
            plgpu.barrier_arrive(free.at[slot])
            return dq

        ragged = lengths_ref is not None or c.s % c.block_k != 0
        bounded = bounds_ref is not None
        dq = walk(
            step,
            zeros((ROWS, c.h)),
            blocks,
            begins=c.window is not None or bounded,
            ends=c.causal or ragged or bounded,
        )
        q_smem.at[me][...] = (dq * dscale(c)).astype(q_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_smem.at[me], dq_ref.at[batch, rows, head])
        plgpu.wait_smem_to_gmem(0)


# Launchers.


def by_head(x: jax.Array, rows: int, fill: float) -> jax.Array:
    """[b t n] as [b n rows]."""
    short = rows - x.shape[1]
    x = jnp.moveaxis(x, 1, 2)
    return jnp.pad(x, [(0, 0), (0, 0), (0, short)], constant_values=fill)


def rows_of(c: Problem, sinks, out, lse, dout, dlse, want_sinks: bool):
    """(lse log2 e, delta), both [b n rows], and dsinks or None."""
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), -1)
    # XLA would reduce inside of the transpose of by_head, 6 times slower.
    delta = lax.optimization_barrier(delta) - dlse
    seen = jnp.isfinite(lse)
    rows = c.blocks * c.block_q
    lse2 = by_head(jnp.where(seen, lse * LOG2_E, jnp.inf), rows, math.inf)
    delta = jnp.where(seen, delta, 0.0)
    dsinks = None
    if sinks is not None and want_sinks:
        share = jnp.exp(sinks.astype(jnp.float32) - jnp.where(seen, lse, jnp.inf))
        dsinks = -jnp.sum(share * delta, (0, 1)).astype(sinks.dtype)
    return lse2, by_head(delta, rows, 0.0), dsinks


@with_bias_gradient
def attention_bwd(
    query,
    key,
    value,
    bias,
    mask,
    q_segment_ids,
    kv_segment_ids,
    kv_lengths,
    q_offset,
    sinks,
    out,
    lse,
    dout,
    dlse,
    *,
    scale,
    causal,
    window,
    softcap,
    wanted,
    interpret=False,
):
    """(dq, dk, dv, None, dsinks); `interpret` runs the kernels on a CPU."""
    c = problem(query, key, value, bias, scale, causal, window, softcap)
    # With block_q = CONSUMERS * ROWS and one tile a program.
    c = dataclasses.replace(c, consumers=CONSUMERS, block_k=BLOCK)
    lse2, delta, dsinks = rows_of(c, sinks, out, lse, dout, dlse, wanted[4])
    q_ids, kv_ids = int32(q_segment_ids), int32(kv_segment_ids)
    by_keys = by_queries = words = turned_words = turned = None
    if q_ids is not None and kv_ids is not None:
        by_keys = segment_bounds(kv_ids, q_ids, KEYS, BLOCK)
        by_queries = segment_bounds(q_ids, kv_ids, c.block_q, BLOCK)
        # whole tiles of either kernel
        q_ids, kv_ids = padded_rows(q_ids, c.block_q), padded_rows(kv_ids, KEYS)
    if mask is not None:
        words = mask_words(mask, c.t, c.s, c.block_q, BLOCK)
        turned_words = mask_words(jnp.swapaxes(mask, 2, 3), c.s, c.t, KEYS, BLOCK)
        by_queries = inside_both(by_queries, word_bounds(words, c.b, c.block_q, BLOCK))
        by_keys = inside_both(by_keys, word_bounds(turned_words, c.b, KEYS, BLOCK))
    if bias is not None:
        turned = whole_blocks(jnp.swapaxes(bias, 2, 3), KEYS, BLOCK)
        bias = whole_blocks(bias, c.block_q, BLOCK)
    key, value = without_rest(key, kv_lengths), without_rest(value, kv_lengths)
    operands = (
        copyable(query, ROWS),
        copyable(key, ROWS),
        copyable(value, ROWS),
        copyable(dout.astype(query.dtype), ROWS),
        lse2,
        delta,
        q_ids,
        kv_ids,
    )
    q, k, v, *_ = operands
    shared = functools.partial(plgpu.SMEM, dtype=query.dtype)
    pair = CONSUMERS, ROWS
    ring = STAGES, BLOCK

    def matrix(rows, columns):
        # WGMMA contracts over the rows in one product, over the columns in another
        return shared((*rows, columns), transforms=tiled(BLOCK, columns))

    def launch(kernel, like, programs, buffers, pairs, copies):
        barriers = (
            plgpu.Barrier(num_barriers=CONSUMERS, num_arrivals=2),
            plgpu.Barrier(num_barriers=STAGES, num_arrivals=copies),
            plgpu.Barrier(num_barriers=STAGES, num_arrivals=CONSUMERS),
        )
        return plgpu.kernel(
            functools.partial(kernel, c=c, interpret=interpret),
            out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like),
            grid=(programs,),
            grid_names=("program",),
            num_threads=CONSUMERS + 1,
            thread_name="warpgroup",
            scratch_types=(buffers, barriers),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=plgpu.InterpretGPUParams() if interpret else None,
        )(*operands, *pairs, int32(kv_lengths), int32(q_offset))

    dq = dk = dv = None
    if wanted[1] or wanted[2]:
        blocks = -(-c.s // KEYS)
        buffers = (
            matrix(pair, c.h),
            matrix(pair, c.hv),
            matrix(ring, c.h),
            matrix(ring, c.hv),
            plgpu.SMEM(ring, jnp.float32),
            plgpu.SMEM(ring, jnp.float32),
        )
        programs = blocks * c.b * (c.n // c.group)
        pairs = turned, turned_words, by_keys
        dk, dv = launch(keys_kernel, (k, v), programs, buffers, pairs, copies=4)
        dk, dv = dk[:, : c.s], dv[:, : c.s]
    if wanted[0]:
        buffers = (
            matrix(pair, c.h),
            matrix(pair, c.hv),
            matrix(ring, c.h),
            matrix(ring, c.hv),
        )
        pairs = bias, words, by_queries
        (dq,) = launch(queries_kernel, (q,), c.tiles, buffers, pairs, copies=2)
        dq = dq[:, : c.t]
    return dq, dk, dv, None, dsinks
