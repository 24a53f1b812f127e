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
    BY_COLUMN,
    BY_ROW,
    LOG2_E,
    ROWS,
    WGMMA,
    Problem,
    by_row,
    copyable,
    int32,
    key_blocks,
    place,
    position_and_length,
    problem,
    tiled,
    unsupported,
)
from jaxkern.primitives.attention.attention import without_rest
from jaxkern.triton.attention.flash_attention import slower as slower_than_xla

BLOCK = 64  # rows of the matrices that are walked over
CONSUMERS = 2
STAGES = 2


def unsupported_bwd(query: Any, value: Any, **rest: Any) -> str | None:
    """A reason in words, or None."""
    if reason := unsupported(query=query, value=value, **rest):
        return reason
    if max(query.shape[3], value.shape[3]) > 128:
        return f"head dims {query.shape[3]} and {value.shape[3]} are above 128"
    if rest.get("softcap") is not None:
        return "the gradient of `softcap` is not written"
    for name in ("q_segment_ids", "kv_segment_ids", "sinks"):
        if rest.get(name) is not None:
            return f"the gradient with `{name}` is not written"
    return None


def slower_bwd(query: Any, key: Any, value: Any, **_: Any) -> str | None:
    """Why "auto" leaves the gradients to the next row, or None."""
    if (query.shape[3], value.shape[3]) != (128, 128):
        return f"head dims {query.shape[3]} and {value.shape[3]} were not measured"
    return slower_than_xla(query, key)


def query_blocks(batch, block, lengths_ref, offset_ref, c: Problem):
    """The blocks [first, last) of queries that see some key of a block of keys."""
    offset, length = position_and_length(batch, lengths_ref, offset_ref, c)
    column = block * (CONSUMERS * ROWS)
    start, stop = jnp.int32(0), jnp.int32(c.t)
    if c.causal:
        start = lax.max(start, column - offset)
    if c.window is not None:
        stop = lax.min(stop, column + CONSUMERS * ROWS - 1 + c.window - offset)
    stop = jnp.where(column < length, lax.max(stop, 0), 0)
    first = lax.div(start, jnp.int32(BLOCK))
    last = lax.div(stop + (BLOCK - 1), jnp.int32(BLOCK))
    return first, lax.max(first, last)


def visible(shape, key_axis, first_key, first_query, offset, length, c: Problem):
    """Which pairs of a block see each other."""

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
    heads = c.n // c.group
    index = lax.axis_index("program")
    block = lax.div(index, jnp.int32(c.b * heads))  # the first see the most queries
    batch = lax.div(lax.rem(index, jnp.int32(c.b * heads)), jnp.int32(heads))
    kv_head = lax.rem(index, jnp.int32(heads))
    first, last = query_blocks(batch, block, lengths_ref, offset_ref, c)
    count = last - first
    steps = count * c.group

    def head_and_row(j):
        at = lax.max(count, jnp.int32(1))
        head = kv_head * c.group + lax.div(j, at)
        return head, (first + lax.rem(j, at)) * BLOCK

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
            head, row = head_and_row(j)
            slot = lax.rem(j, jnp.int32(STAGES))
            rows = pl.ds(row, BLOCK)
            plgpu.barrier_wait(free.at[slot])
            for source, target in ((q_ref, q_smem), (dout_ref, dout_smem)):
                plgpu.copy_gmem_to_smem(
                    source.at[batch, rows, head], target.at[slot], full.at[slot]
                )
            for source, target in ((lse2_ref, lse2_smem), (delta_ref, delta_smem)):
                plgpu.copy_gmem_to_smem(
                    source.at[batch, head, rows], target.at[slot], full.at[slot]
                )

        lax.fori_loop(0, steps, step, None)
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

        def step(j, sums):
            _, query = head_and_row(j)
            slot = lax.rem(j, jnp.int32(STAGES))
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
            p = jnp.exp2(s * c.scale - lax.broadcast_in_dim(lse2, s.shape, [1]))
            seen = visible(s.shape, 0, row, query, offset, length, c)
            p = jnp.where(seen, p, 0.0)
            ds = p * (dp - lax.broadcast_in_dim(delta, s.shape, [1]))
            dtype = q_ref.dtype
            sums = accumulated(
                sums, [(p.astype(dtype), dout), (ds.astype(dtype), q)], interpret
            )
            plgpu.barrier_arrive(free.at[slot])
            return sums

        start = [zeros((ROWS, c.hv)), zeros((ROWS, c.h))]
        dv, dk = lax.fori_loop(0, steps, step, start)
        factor = c.scale / LOG2_E
        for x, staged, target in (
            (dk * factor, k_smem, dk_ref),
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
    first, _, _, last = key_blocks(batch, block, lengths_ref, offset_ref, None, c)

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

        def step(j, dq):
            slot = lax.rem(j, jnp.int32(STAGES))
            plgpu.barrier_wait(full.at[slot])
            k, v = k_smem.at[slot], v_smem.at[slot]
            s, dp = two_products(
                q_smem.at[me],
                k.transpose((1, 0)),
                dout_smem.at[me],
                v.transpose((1, 0)),
            )
            p = jnp.exp2(s * c.scale - by_row(lse2, s.shape))
            key = (first + j) * c.block_k
            seen = visible(s.shape, 1, key, row, offset, length, c)
            p = jnp.where(seen, p, 0.0)
            ds = p * (dp - by_row(delta, s.shape))
            (dq,) = accumulated([dq], [(ds.astype(q_ref.dtype), k)], interpret)
            plgpu.barrier_arrive(free.at[slot])
            return dq

        dq = lax.fori_loop(0, last - first, step, zeros((ROWS, c.h)))
        q_smem.at[me][...] = (dq * (c.scale / LOG2_E)).astype(q_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_smem.at[me], dq_ref.at[batch, rows, head])
        plgpu.wait_smem_to_gmem(0)


# Launchers.


def by_head(x: jax.Array, rows: int, fill: float) -> jax.Array:
    """[b t n] as [b n rows]."""
    short = rows - x.shape[1]
    x = jnp.moveaxis(x, 1, 2)
    return jnp.pad(x, [(0, 0), (0, 0), (0, short)], constant_values=fill)


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
    """(dq, dk, dv, None, None); `interpret` runs the kernels on a CPU."""
    given = bias, mask, q_segment_ids, kv_segment_ids, sinks, softcap
    assert all(x is None for x in given)  # the row refuses them
    c = problem(query, key, value, scale, causal, window, softcap)
    # With block_q = CONSUMERS * ROWS and one tile a program.
    c = dataclasses.replace(c, consumers=CONSUMERS, block_k=BLOCK, scale=scale * LOG2_E)
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), -1) - dlse
    seen = jnp.isfinite(lse)
    rows = c.blocks * c.block_q
    lse2 = by_head(jnp.where(seen, lse * LOG2_E, jnp.inf), rows, math.inf)
    delta = by_head(jnp.where(seen, delta, 0.0), rows, 0.0)
    key, value = without_rest(key, kv_lengths), without_rest(value, kv_lengths)
    operands = (
        copyable(query, ROWS),
        copyable(key, ROWS),
        copyable(value, ROWS),
        copyable(dout.astype(query.dtype), ROWS),
        lse2,
        delta,
        int32(kv_lengths),
        int32(q_offset),
    )
    q, k, v, *_ = operands
    shared = functools.partial(plgpu.SMEM, dtype=query.dtype)
    pair = CONSUMERS, ROWS
    ring = STAGES, BLOCK

    def matrix(rows, columns):
        # WGMMA contracts over the rows in one product, over the columns in another
        return shared((*rows, columns), transforms=tiled(BLOCK, columns))

    def launch(kernel, like, programs, buffers, copies):
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
        )(*operands)

    dq = dk = dv = None
    if wanted[1] or wanted[2]:
        blocks = -(-c.s // (CONSUMERS * ROWS))
        buffers = (
            matrix(pair, c.h),
            matrix(pair, c.hv),
            matrix(ring, c.h),
            matrix(ring, c.hv),
            plgpu.SMEM(ring, jnp.float32),
            plgpu.SMEM(ring, jnp.float32),
        )
        programs = blocks * c.b * (c.n // c.group)
        dk, dv = launch(keys_kernel, (k, v), programs, buffers, copies=4)
        dk, dv = dk[:, : c.s], dv[:, : c.s]
    if wanted[0]:
        buffers = (
            matrix(pair, c.h),
            matrix(pair, c.hv),
            matrix(ring, c.h),
            matrix(ring, c.hv),
        )
        (dq,) = launch(queries_kernel, (q,), c.tiles, buffers, copies=2)
        dq = dq[:, : c.t]
    return dq, dk, dv, None, None
