"""Gradients of attention on Hopper: one kernel of TMA and WGMMA, five products.

With P = exp(S - lse), dP = dout v^T and dS = P (dP - delta), delta = rowsum(dout out) -
dlse, as in FlashAttention-2 (https://arxiv.org/abs/2307.08691):

    dv = P^T dout,    dk = scale dS^T q,    dq = scale dS k

A program holds a block of keys and values and walks over the queries that see them,
through all heads of their group. It has a loader and two consumers of 64 keys, which
compute S and dP transposed, so that P^T and dS^T are in the registers in which WGMMA
takes them; dk and dv stay in registers. dS also goes to shared memory, where both
consumers read it for dq, a half each.

dq is the sum over programs. The copy engine adds 32-bit integers in memory, whose sum
does not depend on the order: each row of dq is counted in units of 2^-30 of a bound of
what the row can be (`unit`). So the results are the same bits every time.
"""

import dataclasses
import functools
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
    padded_rows,
    position_and_length,
    problem,
    tiled,
    unsupported,
)
from jaxkern.primitives.attention.attention import without_rest
from jaxkern.triton.attention.flash_attention import segment_bounds
from jaxkern.triton.block_sizes import tuned

CONSUMERS = 2
KEYS = CONSUMERS * ROWS  # of a program


def unsupported_bwd(query: Any, value: Any, **rest: Any) -> str | None:
    """A reason in words, or None."""
    if reason := unsupported(query=query, value=value, **rest):
        return reason
    h, hv = query.shape[3], value.shape[3]
    if h != hv or h not in (64, 96, 128):
        return f"head dims {h} and {hv} are not both 64, 96 or 128"
    return None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the kernel takes beside the problem.

    Attributes:
      block: queries of a block.
      stages: blocks of queries in shared memory.
      early: P^T dout is issued before dP is waited for.
      section: key heads whose programs run together.
      exact: dq is summed in integers, the same bits every time.
    """

    block: int
    stages: int
    early: bool
    section: int
    exact: bool = True


def query_blocks(batch, block, lengths_ref, offset_ref, bounds_ref, c, sizes):
    """The blocks of queries that see the keys: [first, whole, whole_end, last)."""
    offset, length = position_and_length(batch, lengths_ref, offset_ref, c)
    column = block * KEYS
    end = -(-c.t // sizes.block) * sizes.block  # rows behind t have no weights
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
        row = lax.max(jnp.int32(0), jnp.int32(row)) + round_up * (sizes.block - 1)
        return lax.div(row, jnp.int32(sizes.block))

    first, last = blocks(start), blocks(stop, 1)
    whole, whole_end = blocks(whole_start, 1), blocks(whole_stop)
    if bounds_ref is not None:
        first = lax.max(first, bounds_ref[batch, block, 0])
        whole = lax.max(whole, bounds_ref[batch, block, 1])
        whole_end = lax.min(whole_end, bounds_ref[batch, block, 2])
        last = lax.min(last, bounds_ref[batch, block, 3])
    last = lax.max(first, last)
    whole = lax.min(lax.max(whole, first), last)
    whole_end = lax.max(lax.min(whole_end, last), whole)
    return first, whole, whole_end, last


def place(index, c: Problem, sizes: Sizes):
    """(batch, key head, block of keys) of a program, by sections of heads."""
    heads = c.b * (c.n // c.group)
    blocks = -(-c.s // KEYS)
    part = lax.div(index, jnp.int32(sizes.section * blocks))
    within = lax.rem(index, jnp.int32(sizes.section * blocks))
    present = lax.min(sizes.section, heads - part * sizes.section)
    head = part * sizes.section + lax.rem(within, present)
    block = lax.div(within, present)
    return lax.div(head, c.n // c.group), lax.rem(head, c.n // c.group), block


def backward_kernel(
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    rows_ref,
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
    sizes: Sizes,
    interpret: bool,
):
    k_smem, v_smem, q_smem, dout_smem, rows_smem, ds_smem, dq_smem = buffers
    held, full, free, exchanged = barriers
    me = lax.axis_index("warpgroup")
    batch, kv_head, block = place(lax.axis_index("program"), c, sizes)
    first, whole, whole_end, last = query_blocks(
        batch, block, lengths_ref, offset_ref, bounds_ref, c, sizes
    )
    count = last - first
    even = not (c.causal or c.window is not None or bounds_ref is not None)

    def query_of(j):
        """First row of the j-th block; where all start together, each elsewhere."""
        if even:
            j = first + lax.rem(j - first + block, lax.max(count, jnp.int32(1)))
        return j * sizes.block

    @pl.when(me == CONSUMERS)
    def load():
        plgpu.set_max_registers(24, action="decrease")
        for w in range(CONSUMERS):
            rows = pl.ds((block * CONSUMERS + w) * ROWS, ROWS)
            for source, target in ((k_ref, k_smem), (v_ref, v_smem)):
                plgpu.copy_gmem_to_smem(
                    source.at[batch, rows, kv_head], target.at[w], held
                )

        def step(i, _):
            head = kv_head * c.group + lax.div(i, count)
            slot = lax.rem(i, jnp.int32(sizes.stages))
            rows = pl.ds(query_of(first + lax.rem(i, count)), sizes.block)
            plgpu.barrier_wait(free.at[slot])
            for source, target in (
                (q_ref.at[batch, rows, head], q_smem),
                (dout_ref.at[batch, rows, head], dout_smem),
                (rows_ref.at[batch, head, :, rows], rows_smem),
            ):
                plgpu.copy_gmem_to_smem(source, target.at[slot], full.at[slot])

        lax.fori_loop(0, count * c.group, step, None)
        for slot in range(sizes.stages):
            plgpu.barrier_wait(free.at[slot])

    @pl.when(me < CONSUMERS)
    def differentiate():
        plgpu.set_max_registers(240, action="increase")
        for slot in range(sizes.stages):
            plgpu.barrier_arrive(free.at[slot])
        offset, length = position_and_length(batch, lengths_ref, offset_ref, c)
        key = (block * CONSUMERS + me) * ROWS
        kv_ids = None
        if kv_ids_ref is not None:
            kv_ids = plgpu.load(
                kv_ids_ref.at[batch, pl.ds(key, ROWS)], layout=BY_ROW, optimized=False
            )
        plgpu.barrier_wait(held)

        def visible(query, shape):
            """Which pairs of keys and queries see each other."""

            def iota(axis):
                return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)

            keys = iota(0)
            terms = [keys < length - key]
            if c.causal or c.window is not None:
                ahead = keys - iota(1)
                position = query + offset - key
                if c.causal:
                    terms.append(ahead <= position)
                if c.window is not None:
                    terms.append(ahead > position - c.window)
            if kv_ids is not None:
                q_ids = plgpu.load(
                    q_ids_ref.at[batch, pl.ds(query, sizes.block)],
                    layout=BY_COLUMN,
                    optimized=False,
                )
                q_ids = lax.broadcast_in_dim(q_ids, shape, [1])
                terms.append(by_row(kv_ids, shape) == q_ids)
            return functools.reduce(jnp.logical_and, terms)

        def exponents(s, query, lse2, masked):
            """(log2 of P, what tanh of the cap gives)."""
            bent = None
            if c.softcap is not None:
                bent = jnp.exp2(s * (2 * LOG2_E * c.scale / c.softcap))
                bent = 1.0 - 2.0 / (1.0 + bent)
                s = bent * (c.softcap * LOG2_E)
            else:
                s = s * c.scale
            s = s - by_column(lse2, s.shape)
            if masked:
                s = jnp.where(visible(query, s.shape), s, -jnp.inf)
            return s, bent

        rows_of_me, columns_of_me = parts(me, c, sizes)

        def step(j, carry, member, masked):
            dv, dk = carry
            i = member * count + j - first
            slot, pair = lax.rem(i, jnp.int32(sizes.stages)), lax.rem(i, jnp.int32(2))
            query = query_of(j)
            q, dout = q_smem.at[slot], dout_smem.at[slot]
            plgpu.barrier_wait(full.at[slot])

            def scoped(s_acc, dp_acc, dv_acc, dk_acc, dq_acc):
                if not interpret:  # which has no accumulators that start from values
                    dv_acc[...], dk_acc[...] = dv, dk
                plgpu.wgmma(s_acc, k_smem.at[me], q.transpose((1, 0)))
                plgpu.wgmma(dp_acc, v_smem.at[me], dout.transpose((1, 0)))
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                lse2 = plgpu.load(rows_smem.at[slot, 0], layout=BY_COLUMN)
                s, bent = exponents(s, query, lse2, masked)
                p = jnp.exp2(s)
                p16 = p.astype(q_ref.dtype)
                if sizes.early and not interpret:
                    plgpu.wgmma(dv_acc, p16, dout)
                delta = plgpu.load(rows_smem.at[slot, 1], layout=BY_COLUMN)
                dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=int(sizes.early))
                ds = p * (dp - by_column(delta, dp.shape))
                if bent is not None:
                    ds = ds * (1.0 - bent * bent)
                ds16 = ds.astype(q_ref.dtype)
                ds_smem.at[pair, me][...] = ds16
                plgpu.commit_smem()
                if not sizes.early and not interpret:
                    plgpu.wgmma(dv_acc, p16, dout)
                plgpu.barrier_arrive(exchanged)
                plgpu.barrier_wait(exchanged)
                for w in range(CONSUMERS):
                    of_q = ds_smem.at[pair, w].at[:, rows_of_me]
                    of_k = k_smem.at[w].at[:, columns_of_me]
                    plgpu.wgmma(dq_acc, of_q.transpose((1, 0)), of_k)
                if not interpret:
                    plgpu.wgmma(dk_acc, ds16, q)
                dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                rows = pl.ds(query, sizes.block)
                target = dq_ref.at[batch, rows, kv_head * c.group + member]
                target = target.at[rows_of_me, columns_of_me]
                if sizes.exact:
                    unit = plgpu.load(rows_smem.at[slot, 2, rows_of_me], layout=BY_ROW)
                    dq = (dq * by_row(unit, dq.shape)).astype(jnp.int32)
                if interpret:
                    target[...] = target[...] + dq
                else:
                    dq_smem.at[me][...] = dq
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(dq_smem.at[me], target, reduction_op="add")
                if interpret:
                    new_dv = dv + dot(p16, dout[...])
                    new_dk = dk + dot(ds16, q[...])
                else:
                    new_dk = plgpu.wgmma_accumulator_load(dk_acc, wait_n=0)
                    new_dv = plgpu.wgmma_accumulator_load(dv_acc, wait_n=0)
                plgpu.barrier_arrive(free.at[slot])
                return new_dv, new_dk

            square = (ROWS, sizes.block)
            shapes = square, square, (ROWS, c.hv), (ROWS, c.h), part_shape(c, sizes)
            accumulators = (plgpu.WGMMAAccumulatorRef(x, jnp.float32) for x in shapes)
            return pl.run_scoped(scoped, *accumulators)

        def head(member, carry):
            def walk(start, stop, masked, carry):
                f = functools.partial(step, member=member, masked=masked)
                return lax.fori_loop(start, stop, f, carry)

            ragged = lengths_ref is not None or c.s % KEYS != 0
            if c.causal or bounds_ref is not None:
                carry = walk(first, whole, True, carry)
            carry = walk(whole, whole_end, False, carry)
            if ragged or c.window is not None or bounds_ref is not None:
                carry = walk(whole_end, last, True, carry)
            return carry

        carry = zeros((ROWS, c.hv)), zeros((ROWS, c.h))
        dv, dk = lax.fori_loop(0, c.group, head, carry)
        factor = c.scale if c.softcap is not None else c.scale / LOG2_E
        # The other consumer reads this one's keys until its last product is done.
        plgpu.barrier_arrive(exchanged)
        plgpu.barrier_wait(exchanged)
        for x, staged, target in (
            (dk * factor, k_smem, dk_ref),
            (dv, v_smem, dv_ref),
        ):
            staged.at[me][...] = x.astype(target.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                staged.at[me], target.at[batch, pl.ds(key, ROWS), kv_head]
            )
        plgpu.wait_smem_to_gmem(0)


def part_shape(c: Problem, sizes: Sizes) -> tuple[int, int]:
    """Of dq that each consumer computes: half of the queries or of the columns."""
    return (64, c.h) if sizes.block == 128 else (64, c.h // 2)


def parts(me, c: Problem, sizes: Sizes):
    rows, columns = part_shape(c, sizes)
    if sizes.block == 128:
        return pl.ds(me * rows, rows), pl.ds(0, columns)
    return pl.ds(0, rows), pl.ds(me * columns, columns)


def by_column(x, shape):
    return lax.broadcast_in_dim(x, shape, [1])


def dot(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def tiled_32_bits(columns: int) -> tuple:
    width = next(w for w in (32, 16, 8) if columns % w == 0)
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    return tiling((8, width)), swizzling(4 * width)


def zeros(shape):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)


# Launcher.


def largest(x, axes):
    """The largest |x| that is a number."""
    x = jnp.abs(x.astype(jnp.float32))
    return jnp.max(jnp.where(jnp.isfinite(x), x, 0.0), axes)


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
    assert bias is None and mask is None  # the row refuses them
    c = problem(query, key, value, scale, causal, window, softcap)
    heads = c.n // c.group
    rule = dict(BLOCK=64, STAGES=2, EARLY=1, SECTION=2, EXACT=1)
    found = tuned("hopper_flash_attention_bwd", c.h, query.dtype, rule)
    sizes = Sizes(
        block=found["BLOCK"],
        stages=found["STAGES"],
        early=bool(found["EARLY"]),
        section=min(found["SECTION"], c.b * heads),
        exact=bool(found["EXACT"]),
    )
    key, value = without_rest(key, kv_lengths), without_rest(value, kv_lengths)
    dout = dout.astype(query.dtype)
    wide = dout.astype(jnp.float32)
    delta = jnp.sum(wide * out.astype(jnp.float32), -1) - dlse
    # |dq| <= sum |dS| max |k| <= (|dout| max |v| + |delta|) max |k|
    size = jnp.sqrt(jnp.sum(wide * wide, -1))
    norms = jnp.sqrt(jnp.sum(jnp.square(value.astype(jnp.float32)), -1))

    def of_heads(x):
        return jnp.repeat(x, c.group, 1)[:, None]

    bound = size * of_heads(largest(norms, 1)) + jnp.abs(delta)
    bound = bound * of_heads(largest(key, (1, 3)))
    counts = 2.0**30 / jnp.maximum(bound, 1e-30)
    seen = jnp.isfinite(lse)
    rows = jnp.stack(
        [
            jnp.where(seen, lse * LOG2_E, jnp.inf),
            jnp.where(seen, delta, 0.0),
            jnp.where(seen, counts, 0.0),
        ],
        1,
    )
    padded_t = -(-c.t // sizes.block) * sizes.block
    rows = jnp.moveaxis(rows, 3, 1)  # [b n 3 t]
    short = padded_t - c.t
    if short:
        rows = jnp.concatenate(
            [rows, jnp.zeros((*rows.shape[:3], short)).at[:, :, 0].set(jnp.inf)], -1
        )
    q_ids, kv_ids, bounds = int32(q_segment_ids), int32(kv_segment_ids), None
    if q_ids is not None and kv_ids is not None:
        bounds = segment_bounds(kv_ids, q_ids, KEYS, sizes.block)
        q_ids, kv_ids = padded_rows(q_ids, sizes.block), padded_rows(kv_ids, KEYS)
    q, k = copyable(query, sizes.block), copyable(key, ROWS)
    v, dout = copyable(value, ROWS), copyable(dout, sizes.block)
    shared = functools.partial(plgpu.SMEM, dtype=query.dtype)
    pair = (CONSUMERS, ROWS)
    ring = (sizes.stages, sizes.block)
    kind = jnp.int32 if sizes.exact else jnp.float32
    part = part_shape(c, sizes)
    narrow = tiled(ROWS, part[1])  # k, q and dS meet in products
    buffers = (
        shared((*pair, c.h), transforms=narrow),
        shared((*pair, c.hv), transforms=tiled(ROWS, c.hv)),
        shared((*ring, c.h), transforms=narrow),
        shared((*ring, c.hv), transforms=tiled(sizes.block, c.hv)),
        plgpu.SMEM((sizes.stages, 3, sizes.block), jnp.float32),
        shared((2, *pair, sizes.block), transforms=narrow),
        plgpu.SMEM((CONSUMERS, *part), kind, transforms=tiled_32_bits(part[1])),
    )
    barriers = (
        plgpu.Barrier(num_arrivals=2 * CONSUMERS),  # keys and values are there
        plgpu.Barrier(num_barriers=sizes.stages, num_arrivals=3),  # queries
        plgpu.Barrier(num_barriers=sizes.stages, num_arrivals=CONSUMERS),
        plgpu.Barrier(num_arrivals=CONSUMERS),  # dS of both
    )

    def body(q, k, v, dout, rows, q_ids, kv_ids, bounds, lengths, offset, dq, *rest):
        return backward_kernel(
            q,
            k,
            v,
            dout,
            rows,
            q_ids,
            kv_ids,
            bounds,
            lengths,
            offset,
            dq,
            *rest,
            c=c,
            sizes=sizes,
            interpret=interpret,
        )

    @jax.jit
    def launch(*operands):
        dq = jax.new_ref(jnp.zeros((c.b, padded_t, c.n, c.h), kind))
        dk, dv = plgpu.kernel(
            body,
            out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)),
            grid=(-(-c.s // KEYS) * c.b * heads,),
            grid_names=("program",),
            num_threads=CONSUMERS + 1,
            thread_name="warpgroup",
            scratch_types=(buffers, barriers),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=plgpu.InterpretGPUParams() if interpret else None,
        )(*operands, dq)
        return jax.freeze(dq), dk, dv

    operands = (q, k, v, dout, rows, q_ids, kv_ids, bounds)
    dq, dk, dv = launch(*operands, int32(kv_lengths), int32(q_offset))
    factor = scale
    dq = dq[:, : c.t].astype(jnp.float32)
    if sizes.exact:
        # Not a number where the row's bound is none.
        inverse = jnp.where(seen, factor / counts, 0.0)
        dq = dq * inverse[..., None]
    else:
        dq = dq * factor
    dsinks = None
    if sinks is not None and wanted[4]:
        share = jnp.exp(sinks.astype(jnp.float32) - lse)
        share = jnp.where(seen, share, 0.0)
        dsinks = -jnp.sum(share * jnp.where(seen, delta, 0.0), (0, 1))
        dsinks = dsinks.astype(sinks.dtype)
    return (
        dq.astype(query.dtype),
        dk[:, : c.s],
        dv[:, : c.s],
        None,
        dsinks,
    )
