"""Gradients of attention on Hopper in one kernel of five products.

A program holds 128 keys and walks over the queries that see them, through all heads of
the group, as `keys_kernel` does; flash_attention_bwd.py has the formulas. It also
computes what its keys add to dq, so S and dP are computed once.

dS goes to shared memory. Each consumer reads that of both and computes half of the
columns of dS k, a block later, so that it does not wait for the other. A warpgroup of
its own has the copy engine add the result to dq in memory. As integers: each row of dq
is counted in units of 2^-30 of a bound of |dq|, and the sum is the same bits in any
order.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from jaxkern.pallas.attention.blocks import position_and_length
from jaxkern.pallas.attention.flash_attention import copyable, int32, padded_rows
from jaxkern.pallas.attention.flash_attention_bwd import (
    rows_of,
    slower_bwd,
    unsupported_bwd,
)
from jaxkern.pallas.attention.gradient_blocks import (
    BLOCK,
    CONSUMERS,
    KEYS,
    STAGES,
    by_column,
    dot,
    dscale,
    place_keys,
    query_blocks,
    same_ids,
    slopes,
    sum_of,
    visible,
    walk,
    weights,
    zeros,
)
from jaxkern.pallas.attention.pairs import BY_COLUMN, BY_ROW
from jaxkern.pallas.attention.problem import ROWS, Problem, problem
from jaxkern.pallas.attention.wgmma import WGMMA, by_row, opaque, tiled
from jaxkern.primitives.attention.attention import without_rest
from jaxkern.triton.attention.flash_attention import segment_bounds

HEAD_DIM = 128
HALF = HEAD_DIM // CONSUMERS  # columns of dq of a consumer
SLOTS = 2  # of dS
MANY = 4096  # keys that a query sees, from which on it was faster than two kernels
FRACTION = 2.0**-30  # of a bound of |dq|, in which dq is counted
SMALLEST = 1e-28  # bound whose fraction is no denormal


def unsupported_joint(**operands: Any) -> str | None:
    """A reason in words, or None."""
    if reason := unsupported_bwd(**operands):
        return reason
    h, hv = operands["query"].shape[3], operands["value"].shape[3]
    if h != HEAD_DIM or hv != HEAD_DIM:
        return f"head dims {h} and {hv} are not {HEAD_DIM}"
    for name in ("bias", "mask", "softcap"):
        if operands[name] is not None:
            return f"`{name}` needs registers that are not there"
    return None


def slower_joint(
    query: Any,
    key: Any,
    q_segment_ids: Any,
    causal: bool,
    window: int | None,
    **rest: Any,
) -> str | None:
    """Why "auto" leaves the gradients to the next row, or None."""
    if reason := slower_bwd(query=query, key=key, **rest):
        return reason
    if q_segment_ids is not None:
        return "with segments it was not measured"
    seen = key.shape[1] // 2 if causal else key.shape[1]
    seen = min(seen, window or seen)
    if seen < MANY:
        return f"queries see {seen} keys, fewer than {MANY}"
    return None


def integers(x):
    """x as int32; astype would clamp it first."""
    dtype = jnp.dtype(jnp.int32)
    result = plgpu.ShapeDtypeStruct(x.shape, dtype, layout=WGMMA)

    def convert(_, x):
        return x.astype(ir.IntegerType.get_signless(32), is_signed=True)

    # what it decorates takes no context, which a type checker does not see
    inline: Any = plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=result)
    return inline(convert)(x)


def joint_kernel(
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse2_ref,
    delta_ref,
    counts_ref,
    q_ids_ref,
    kv_ids_ref,
    bounds_ref,
    lengths_ref,
    offset_ref,
    dq_ref,
    dk_ref,
    dv_ref,
    buffers,
    barriers,
    *,
    c: Problem,
    interpret: bool,
):
    k_smem, v_smem, q_smem, dout_smem, rows_smem, ds_smem, dq_smem = buffers
    lse2_smem, delta_smem, counts_smem = rows_smem
    held, full, free, ds_ready, ds_free, dq_full, dq_free = barriers
    me = lax.axis_index("warpgroup")
    batch, kv_head, block = place_keys(lax.axis_index("program"), c)
    blocks = query_blocks(batch, block, lengths_ref, offset_ref, bounds_ref, c)
    first, _, _, last = blocks
    count = last - first
    steps = count * c.group

    def walk_all(f):
        """f(i, head, block of queries) for every step."""

        def head(member, i):
            def step(j, i):
                f(i, kv_head * c.group + member, j)
                return i + 1

            return lax.fori_loop(first, last, step, i)

        lax.fori_loop(0, c.group, head, jnp.int32(0))

    @pl.when(me == CONSUMERS)
    def load():
        plgpu.set_max_registers(24, action="decrease")
        for w in range(CONSUMERS):
            rows = pl.ds((block * CONSUMERS + w) * ROWS, ROWS)
            for source, target in ((k_ref, k_smem), (v_ref, v_smem)):
                plgpu.copy_gmem_to_smem(
                    source.at[batch, rows, kv_head], target.at[w], held
                )

        def fetch(i, head, j):
            slot = lax.rem(i, jnp.int32(STAGES))
            rows = pl.ds(j * BLOCK, BLOCK)
            plgpu.barrier_wait(free.at[slot])
            for source, target in (
                (q_ref.at[batch, rows, head], q_smem),
                (dout_ref.at[batch, rows, head], dout_smem),
                (lse2_ref.at[batch, head, rows], lse2_smem),
                (delta_ref.at[batch, head, rows], delta_smem),
                (counts_ref.at[batch, head, rows], counts_smem),
            ):
                plgpu.copy_gmem_to_smem(source, target.at[slot], full.at[slot])

        walk_all(fetch)
        for slot in range(STAGES):
            plgpu.barrier_wait(free.at[slot])

    @pl.when(me == CONSUMERS + 1)
    def add():
        plgpu.set_max_registers(24, action="decrease")
        for w in range(CONSUMERS):
            plgpu.barrier_arrive(dq_free.at[w])

        for w in range(CONSUMERS):
            plgpu.barrier_wait(dq_full.at[w])
            plgpu.barrier_arrive(dq_free.at[w])

        def add_block(_, head, j):
            for w in range(CONSUMERS):
                target = dq_ref.at[batch, pl.ds(j * BLOCK, BLOCK), head]
                target = target.at[:, pl.ds(w * HALF, HALF)]
                plgpu.barrier_wait(dq_full.at[w])
                if interpret:  # which cannot add as it copies
                    target[...] = target[...] + dq_smem.at[w][...]
                else:
                    plgpu.copy_smem_to_gmem(dq_smem.at[w], target, reduction_op="add")
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(dq_free.at[w])

        walk_all(add_block)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(me < CONSUMERS)
    def differentiate():
        plgpu.set_max_registers(232, action="increase")
        for slot in range(STAGES):
            plgpu.barrier_arrive(free.at[slot])
        offset, length = position_and_length(batch, lengths_ref, offset_ref, c)
        row = (block * CONSUMERS + me) * ROWS
        kv_ids = None
        if kv_ids_ref is not None:
            ids = kv_ids_ref.at[batch, pl.ds(row, ROWS)]
            kv_ids = plgpu.load(ids, layout=BY_ROW, optimized=False)
        dtype = q_ref.dtype
        half, part = pl.ds(me * HALF, HALF), (BLOCK, HALF)
        # The first step computes dq of zeros, which nobody adds.
        ds_smem.at[1, me][...] = zeros((ROWS, BLOCK)).astype(dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(ds_ready.at[1])
        plgpu.barrier_arrive(ds_free.at[0])
        plgpu.barrier_wait(held)

        def issue_dq(acc, slot):
            for w in range(CONSUMERS):
                at = opaque(jnp.int32(w))
                ds = ds_smem.at[slot, at].transpose((1, 0))
                plgpu.wgmma(acc, ds, k_smem.at[at].at[:, half])

        def store_dq(dq, counts):
            dq = dq * by_row(counts, dq.shape)
            dq_smem.at[me][...] = dq.astype(jnp.int32) if interpret else integers(dq)
            plgpu.commit_smem()
            plgpu.barrier_arrive(dq_full.at[me])

        def step(j, carry, masked, member):
            dv, dk, counts = carry
            i = member * count + j - first
            slot, ds_slot = lax.rem(i, jnp.int32(STAGES)), lax.rem(i, jnp.int32(SLOTS))
            before = 1 - ds_slot
            q, dout = q_smem.at[slot], dout_smem.at[slot]
            plgpu.barrier_wait(full.at[slot])

            def rounded(s_acc, dp_acc):
                """(P, dS)."""
                mine = opaque(jnp.int32(me))
                plgpu.wgmma(s_acc, k_smem.at[mine], q.transpose((1, 0)))
                plgpu.wgmma(dp_acc, v_smem.at[mine], dout.transpose((1, 0)))
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                lse2 = plgpu.load(lse2_smem.at[slot], layout=BY_COLUMN)
                seen = None
                if masked:
                    seen = visible(s.shape, 0, row, j * BLOCK, offset, length, c)
                    if kv_ids is not None:
                        ids = q_ids_ref.at[batch, pl.ds(j * BLOCK, BLOCK)]
                        seen = jnp.logical_and(seen, same_ids(kv_ids, ids, s.shape))
                p, _ = weights(s, None, by_column(lse2, s.shape), seen, c)
                dp = dp_acc[...]
                delta = plgpu.load(delta_smem.at[slot], layout=BY_COLUMN)
                ds = slopes(p, dp, by_column(delta, s.shape), None)
                return p.astype(dtype), ds.astype(dtype)

            square = sum_of((ROWS, BLOCK))
            p, ds = pl.run_scoped(rounded, square, square)
            plgpu.barrier_wait(ds_free.at[ds_slot])
            ds_smem.at[ds_slot, me][...] = ds
            plgpu.commit_smem()
            plgpu.barrier_arrive(ds_ready.at[ds_slot])
            plgpu.barrier_wait(ds_ready.at[before])
            plgpu.barrier_wait(dq_free.at[me])

            def products(dv_acc, dk_acc, dq_acc):
                if not interpret:  # which has no accumulators that start from values
                    dv_acc[...], dk_acc[...] = dv, dk
                    # Zeros that are no constant: ptxas keeps an accumulator of
                    # constants beside those of S and dP, has too few registers for
                    # that, and serialises all products.
                    nothing = jnp.minimum(jnp.abs(counts), 0.0)
                    dq_acc[...] = by_row(nothing, dq_acc.shape)
                issue_dq(dq_acc, before)
                if not interpret:
                    plgpu.wgmma(dv_acc, p, dout)
                    plgpu.wgmma(dk_acc, ds, q)
                dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=2)
                plgpu.barrier_arrive(ds_free.at[before])
                store_dq(dq, counts)
                if interpret:
                    return dv + dot(p, dout[...]), dk + dot(ds, q[...])
                return dv_acc[...], dk_acc[...]

            dv, dk = pl.run_scoped(products, *map(sum_of, (dv.shape, dk.shape, part)))
            counts = plgpu.load(counts_smem.at[slot], layout=BY_ROW)
            plgpu.barrier_arrive(free.at[slot])
            return dv, dk, counts

        def head(member, carry):
            ragged = lengths_ref is not None or c.s % KEYS != 0
            bounded = bounds_ref is not None
            return walk(
                functools.partial(step, member=member),
                carry,
                blocks,
                begins=c.causal or bounded,
                ends=ragged or c.window is not None or bounded,
            )

        counts = plgpu.layout_cast(jnp.zeros((BLOCK,), jnp.float32), BY_ROW)
        start = zeros((ROWS, c.hv)), zeros((ROWS, c.h)), counts
        dv, dk, counts = lax.fori_loop(0, c.group, head, start)
        slot = lax.rem(steps + 1, jnp.int32(SLOTS))
        plgpu.barrier_wait(ds_ready.at[slot])
        plgpu.barrier_wait(dq_free.at[me])

        def rest(acc):
            issue_dq(acc, slot)
            return acc[...]

        store_dq(pl.run_scoped(rest, sum_of(part)), counts)
        plgpu.barrier_arrive(ds_free.at[slot])
        for slot in range(SLOTS):  # the other consumer needs these keys no more
            plgpu.barrier_wait(ds_free.at[slot])
        for x, staged, target in (
            (dk * dscale(c), k_smem, dk_ref),
            (dv, v_smem, dv_ref),
        ):
            staged.at[me][...] = x.astype(target.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                staged.at[me], target.at[batch, pl.ds(row, ROWS), kv_head]
            )
        plgpu.barrier_wait(dq_free.at[me])
        plgpu.wait_smem_to_gmem(0)


# Launcher.


def dq_units(c: Problem, key, value, dout, delta):
    """In what each row of dq, [b n t], is counted.

    |dq| <= sum |dS| max |k| <= (|dout| max |v| + |delta|) max |k|
    """

    def norm(x):
        return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), -1))

    def largest(x, axes):
        # not a number where some x is not finite, which a maximum may hide
        return jnp.max(x, axes) + 0.0 * jnp.sum(x, axes)

    def of_heads(x):
        return jnp.repeat(x, c.group, 1)[..., None]

    size = jnp.pad(
        jnp.moveaxis(norm(dout), 1, 2), [(0, 0), (0, 0), (0, delta.shape[2] - c.t)]
    )
    slopes = size * of_heads(largest(norm(value), 1)) + jnp.abs(delta)
    widest = largest(jnp.abs(key.astype(jnp.float32)), (1, 3))
    return jnp.maximum(slopes * of_heads(widest), SMALLEST) * FRACTION


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
    """(dq, dk, dv, None, dsinks); `interpret` runs the kernel on a CPU."""
    assert bias is None and mask is None and softcap is None  # the row refuses them
    c = problem(query, key, value, None, scale, causal, window, softcap)
    # With block_q = CONSUMERS * ROWS and one tile a program.
    c = dataclasses.replace(c, consumers=CONSUMERS, block_k=BLOCK)
    lse2, delta, dsinks = rows_of(c, sinks, out, lse, dout, dlse, wanted[4])
    q_ids, kv_ids, bounds = int32(q_segment_ids), int32(kv_segment_ids), None
    if q_ids is not None and kv_ids is not None:
        bounds = segment_bounds(kv_ids, q_ids, KEYS, BLOCK)
        q_ids, kv_ids = padded_rows(q_ids, BLOCK), padded_rows(kv_ids, KEYS)
    key, value = without_rest(key, kv_lengths), without_rest(value, kv_lengths)
    units = dq_units(c, key, value, dout, delta)
    seen = jnp.isfinite(lse2)
    q, k, v, dout = (
        copyable(x.astype(query.dtype), ROWS) for x in (query, key, value, dout)
    )

    def matrix(*shape):
        # WGMMA contracts over the rows in one product, over the columns in another
        return plgpu.SMEM(shape, query.dtype, transforms=tiled(BLOCK, shape[-1]))

    # abstract only to a type checker, as jax writes them
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    words = tiling((8, 32)), swizzling(128)
    buffers = (
        matrix(CONSUMERS, ROWS, c.h),
        matrix(CONSUMERS, ROWS, c.hv),
        matrix(STAGES, BLOCK, c.h),
        matrix(STAGES, BLOCK, c.hv),
        [plgpu.SMEM((STAGES, BLOCK), jnp.float32)] * 3,  # lse, delta and counts
        matrix(SLOTS, CONSUMERS, ROWS, BLOCK),
        plgpu.SMEM((CONSUMERS, BLOCK, HALF), jnp.int32, transforms=words),
    )
    barriers = (
        plgpu.Barrier(num_arrivals=2 * CONSUMERS),  # keys and values are there
        plgpu.Barrier(num_barriers=STAGES, num_arrivals=5),  # queries are there
        plgpu.Barrier(num_barriers=STAGES, num_arrivals=CONSUMERS),  # and not needed
        plgpu.Barrier(num_barriers=SLOTS, num_arrivals=CONSUMERS),  # dS of both
        plgpu.Barrier(num_barriers=SLOTS, num_arrivals=CONSUMERS),  # and not needed
        plgpu.Barrier(num_barriers=CONSUMERS),  # dq is there
        plgpu.Barrier(num_barriers=CONSUMERS),  # and read
    )

    def kernel(*refs):
        joint_kernel(*refs, c=c, interpret=interpret)

    @jax.jit
    def launch(*operands):
        dq = jax.new_ref(jnp.zeros((c.b, lse2.shape[2], c.n, c.h), jnp.int32))

        def body(*refs):
            *ins, dq, dk, dv, buffers, barriers = refs
            kernel(*ins, dq, dk, dv, buffers, barriers)

        dk, dv = plgpu.kernel(
            body,
            out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)),
            grid=(-(-c.s // KEYS) * c.b * (c.n // c.group),),
            grid_names=("program",),
            num_threads=CONSUMERS + 2,
            thread_name="warpgroup",
            scratch_types=(buffers, barriers),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=plgpu.InterpretGPUParams() if interpret else None,
        )(*operands, dq)
        return jax.freeze(dq), dk, dv

    dq, dk, dv = launch(
        q,
        k,
        v,
        dout,
        lse2,
        delta,
        jnp.where(seen, 1 / units, 0.0),
        q_ids,
        kv_ids,
        bounds,
        int32(kv_lengths),
        int32(q_offset),
    )
    # Not a number where the bound is none.
    inverse = jnp.where(seen, units * dscale(c), 0.0)[:, :, : c.t]
    dq = dq[:, : c.t] * jnp.moveaxis(inverse, 1, 2)[..., None]
    return dq.astype(query.dtype), dk[:, : c.s], dv[:, : c.s], None, dsinks
