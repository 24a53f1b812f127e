"""Gradients of attention on Hopper: two kernels of TMA and WGMMA, without atomics.

With P = exp(S - lse), dP = dout v^T and dS = P (dP - delta), delta = rowsum(dout out) -
dlse, as in FlashAttention-2 (https://arxiv.org/abs/2307.08691):

    dv = P^T dout,    dk = scale dS^T q,    dq = scale dS k

One kernel holds keys and values and walks over the queries that see them, through all
heads of the group; it computes S and dP transposed, so that P^T and dS^T are in the
registers in which WGMMA takes them. The other holds queries and walks over their keys.
Each has a loader and two consumers of 64 rows, as the forward kernel; one consumer's
exponentials lie under the products of the other. Above head dims of 128 registers do
not hold all of that: the consumers of the first kernel compute dP when P has been used,
and above those of 192 and 128 they share 64 keys.

The second kernel writes dS where the gradient of a bias asks for it, each block once.
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
    finished_sum,
    int32,
    issue_sum,
    key_blocks,
    opaque,
    padded_rows,
    place,
    position_and_length,
    problem,
    set_sum,
    tiled,
    unsupported,
)
from jaxkern.pallas.attention.pairs import (
    BY_COLUMN,
    BY_ROW,
    LOG2_E,
    bias_tile,
    bias_tiles,
    copied_bias,
    inside_both,
    is_set,
    mask_words,
    own,
    pair_bytes,
    whole_blocks,
    word_bounds,
)
from jaxkern.primitives.attention.attention import without_rest
from jaxkern.triton.attention.flash_attention import (
    segment_bounds,
    with_bias_gradient,
)
from jaxkern.triton.attention.flash_attention import slower as slower_than_xla
from jaxkern.triton.block_sizes import next_power_of_2, tuned

BLOCK = 64  # rows of the matrices that are walked over
CONSUMERS = 2
KEYS = CONSUMERS * ROWS  # of a program that holds keys
STAGES = 2
SHARED_BYTES = 232_448 - 2048  # of a program; the rest is for barriers
P_SLOTS = 2  # tiles of weights between the consumers
SHIFT = 15  # 2 to that scales weights that are kept in 16 bits
NARROW = 256  # head dims together, with which registers hold S and dP at once
FASTER = {(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)}  # than Triton
MEASURED = 128  # queries of the shortest sequence that was measured


def unsupported_bwd(query: Any, value: Any, **rest: Any) -> str | None:
    """A reason in words, or None."""
    if reason := unsupported(query=query, value=value, **rest):
        return reason
    return None


def slower_bwd(query: Any, key: Any, value: Any, **_: Any) -> str | None:
    """Why "auto" leaves the gradients to the next row, or None."""
    if (query.shape[3], value.shape[3]) not in FASTER:
        dims = f"head dims {query.shape[3]} and {value.shape[3]}"
        return f"no gain was measured at {dims}"
    if query.shape[1] < MEASURED:
        return f"fewer than {MEASURED} queries were not measured"
    return slower_than_xla(query, key)


def place_keys(index, c: Problem, keys: int = KEYS):
    """(batch, key head, block of keys) of a program, by sections of heads.

    Of so many heads that their queries and cotangents fit the cache.
    """
    heads = c.b * (c.n // c.group)
    blocks = -(-c.s // keys)
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


def query_blocks(
    batch,
    block,
    lengths_ref,
    offset_ref,
    bounds_ref,
    c: Problem,
    keys: int = KEYS,
    rows: int = BLOCK,
):
    """The blocks of `rows` queries that see some of the keys: [first, last).

    Of these [whole, whole_end) see all keys of the block.
    """
    offset, length = position_and_length(batch, lengths_ref, offset_ref, c)
    column = block * keys
    end = -(-c.t // rows) * rows  # rows behind t have no weights
    start, stop, whole_start, whole_stop = 0, end, 0, end
    if c.causal:
        start = column - offset
        whole_start = start + keys - 1
    if c.window is not None:
        stop = lax.min(end, column + keys - 1 + c.window - offset)
        whole_stop = lax.min(end, column + c.window - offset)
    stop = jnp.where(column < length, stop, 0)
    whole_stop = jnp.where(column + keys <= length, whole_stop, 0)

    def blocks(row, round_up=0):
        row = lax.max(jnp.int32(0), jnp.int32(row)) + round_up * (rows - 1)
        return lax.div(row, jnp.int32(rows))

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
    # one fused multiply-add more than without a bias
    return z + (-lse2 if bias is None else bias * LOG2_E - lse2), bent


def weights(s, bias, lse2, seen, c: Problem):
    """(P, tanh of the cap or None), with `seen` None where all pairs see each other."""
    z, bent = exponents(s, bias, lse2, c)
    if seen is not None:
        z = jnp.where(seen, z, -jnp.inf)
    return jnp.exp2(z), bent


def scaled_slopes(p, dp, delta):
    """dS of weights that are kept in 16 bits, times 2^SHIFT."""
    unit = 2.0**-SHIFT
    return p.astype(jnp.float32) * (dp * unit - by_column(delta * unit, dp.shape))


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

    shape = sum_of((a.shape[0], b.shape[1]))
    return pl.run_scoped(scoped, shape, shape)


def product(a, b):
    """a b; both in shared memory."""

    def scoped(ref):
        plgpu.wgmma(ref, a, b)
        return ref[...]

    shape = sum_of((a.shape[0], b.shape[1]))
    return pl.run_scoped(scoped, shape)


def accumulated(sums, products, interpret):
    """sums[i] + a b, for each (a, b) of products; a in registers."""
    each = list(zip(sums, products, strict=True))

    def scoped(*refs):
        for ref, x in zip(refs, sums, strict=True):
            set_sum(ref, x, interpret)
        for ref, (a, b) in zip(refs, products, strict=True):
            issue_sum(ref, a, b, interpret)
        return [
            finished_sum(ref, x, a, b, interpret)
            for ref, (x, (a, b)) in zip(refs, each, strict=True)
        ]

    return pl.run_scoped(scoped, *(sum_of(x.shape) for x in sums))


def sum_of(shape):
    return plgpu.WGMMAAccumulatorRef(shape, jnp.float32)


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
    in_turn: bool = False,
):
    """dk and dv of KEYS keys, 64 in each consumer.

    `in_turn`: dP is computed when P has been rounded and dv added to, as registers have
    no room for both. P is then scaled as in wide_keys_kernel.
    """
    k_smem, v_smem, q_smem, dout_smem, lse2_smem, delta_smem, bias_smem = buffers
    ready, full, free = barriers
    stages, block_q, _ = q_smem.shape
    me = lax.axis_index("warpgroup")
    batch, kv_head, block = place_keys(lax.axis_index("program"), c)
    blocks = query_blocks(
        batch, block, lengths_ref, offset_ref, bounds_ref, c, KEYS, block_q
    )
    first, _, _, last = blocks
    count = last - first

    @pl.when(me == CONSUMERS)
    def load():
        plgpu.set_max_registers(24, action="decrease")
        for w in range(CONSUMERS):
            rows = pl.ds((block * CONSUMERS + w) * ROWS, ROWS)
            for source, target in ((k_ref, k_smem), (v_ref, v_smem)):
                plgpu.copy_gmem_to_smem(
                    source.at[batch, rows, kv_head], target.at[w], ready.at[w]
                )

        def step(j, _):
            head = kv_head * c.group + lax.div(j, count)
            slot = lax.rem(j, jnp.int32(stages))
            rows = pl.ds((first + lax.rem(j, count)) * block_q, block_q)
            plgpu.barrier_wait(free.at[slot])
            for source, target in ((q_ref, q_smem), (dout_ref, dout_smem)):
                plgpu.copy_gmem_to_smem(
                    source.at[batch, rows, head], target.at[slot], full.at[slot]
                )
            for source, target in ((lse2_ref, lse2_smem), (delta_ref, delta_smem)):
                plgpu.copy_gmem_to_smem(
                    source.at[batch, head, rows], target.at[slot], full.at[slot]
                )
            if bias_smem is not None:
                for w in range(CONSUMERS):
                    columns = pl.ds((block * CONSUMERS + w) * ROWS, ROWS)
                    plgpu.copy_gmem_to_smem(
                        bias_ref.at[*own(bias_ref, batch, head), rows, columns],
                        bias_smem.at[slot, w],
                        full.at[slot],
                    )

        lax.fori_loop(0, count * c.group, step, None)
        for slot in range(stages):
            plgpu.barrier_wait(free.at[slot])

    @pl.when(me < CONSUMERS)
    def differentiate():
        plgpu.set_max_registers(240, action="increase")
        for slot in range(stages):
            plgpu.barrier_arrive(free.at[slot])
        plgpu.barrier_wait(ready.at[me])
        offset, length = position_and_length(batch, lengths_ref, offset_ref, c)
        row = (block * CONSUMERS + me) * ROWS
        kv_ids = None
        if kv_ids_ref is not None:
            ids = kv_ids_ref.at[batch, pl.ds(row, ROWS)]
            kv_ids = plgpu.load(ids, layout=BY_ROW, optimized=False)

        def weights_of(s, lse2, slot, j, masked, member):
            seen = bias = None
            query, n = j * block_q, kv_head * c.group + member
            if bias_smem is not None:
                bias = copied_bias(bias_smem.at[slot, me], turned=True)
            elif bias_ref is not None:
                bias = bias_tile(bias_ref, batch, n, row, query, s.shape)
            if masked:
                seen = visible(s.shape, 0, row, query, offset, length, c)
                if kv_ids is not None:
                    ids = q_ids_ref.at[batch, pl.ds(query, block_q)]
                    seen = jnp.logical_and(seen, same_ids(kv_ids, ids, s.shape))
                if words_ref is not None:
                    bits = is_set(words_ref, batch, n, row, query, s.shape)
                    seen = jnp.logical_and(seen, bits)
            return weights(s, bias, by_column(lse2, s.shape), seen, c)

        def step(j, sums, masked, member):
            slot = lax.rem(member * count + j - first, jnp.int32(stages))
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
            p, bent = weights_of(s, lse2, slot, j, masked, member)
            ds = slopes(p, dp, by_column(delta, s.shape), bent)
            dtype = q_ref.dtype
            sums = accumulated(
                sums, [(p.astype(dtype), dout), (ds.astype(dtype), q)], interpret
            )
            plgpu.barrier_arrive(free.at[slot])
            return sums

        def step_in_turn(j, carry, masked, member):
            """The product for dk of the block before lies under the exponentials."""
            dv, dk, before = carry
            i = member * count + j - first
            slot = lax.rem(i, jnp.int32(stages))
            slot_before = lax.rem(lax.max(i - 1, jnp.int32(0)), jnp.int32(stages))
            q_before = q_smem.at[slot_before]
            plgpu.barrier_wait(full.at[slot])
            q, dout = q_smem.at[slot], dout_smem.at[slot]
            held = opaque(me)

            def keys_and_weights(s_ref, dk_ref):
                set_sum(dk_ref, dk, interpret)
                plgpu.wgmma(s_ref, k_smem.at[held], q.transpose((1, 0)))
                issue_sum(dk_ref, before, q_before, interpret)
                s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                lse2 = plgpu.load(lse2_smem.at[slot], layout=BY_COLUMN)
                p, bent = weights_of(s, lse2, slot, j, masked, member)
                if bent is None:
                    p = curve = lax.optimization_barrier(p)
                else:
                    p, curve = lax.optimization_barrier((p, p * (1.0 - bent * bent)))
                summed = finished_sum(dk_ref, dk, before, q_before, interpret)
                return summed, p.astype(q_ref.dtype), curve.astype(jnp.float16)

            dk, p, curve = pl.run_scoped(
                keys_and_weights, sum_of((ROWS, block_q)), sum_of(dk.shape)
            )

            @pl.when(i > 0)
            def release():
                plgpu.barrier_arrive(free.at[slot_before])

            (dv,) = accumulated([dv], [(p, dout)], interpret)
            dp = product(v_smem.at[held], dout.transpose((1, 0)))
            delta = plgpu.load(delta_smem.at[slot], layout=BY_COLUMN)
            return dv, dk, scaled_slopes(curve, dp, delta).astype(q_ref.dtype)

        def head(member, sums):
            ragged = lengths_ref is not None or c.s % KEYS != 0
            bounded = bounds_ref is not None
            return walk(
                functools.partial(step_in_turn if in_turn else step, member=member),
                sums,
                blocks,
                begins=c.causal or bounded,
                ends=ragged or c.window is not None or bounded,
            )

        start = [zeros((ROWS, c.hv)), zeros((ROWS, c.h))]
        if in_turn:
            none = zeros((ROWS, block_q)).astype(q_ref.dtype)
            dv, dk, ds = lax.fori_loop(0, c.group, head, (*start, none))
            dv = dv * 2.0**-SHIFT

            def last_block(i, dk):
                slot = lax.rem(i, jnp.int32(stages))
                (dk,) = accumulated([dk], [(ds, q_smem.at[slot])], interpret)
                plgpu.barrier_arrive(free.at[slot])
                return dk

            visits = count * c.group
            dk = lax.fori_loop(
                lax.max(visits - 1, jnp.int32(0)), visits, last_block, dk
            )
        else:
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


def wide_keys_kernel(
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
    """keys_kernel for head dims whose sums are too wide for one consumer.

    One consumer computes P and dv, the other dP, dS and dk. P goes from one to the
    other, times 2^SHIFT so that float16 holds it to 11 bits however small it is. `lse2`
    is less by SHIFT for that. No product is computed twice.
    """
    k_smem, v_smem, q_smem, dout_smem, lse2_smem, delta_smem, p_smem, bias_smem = (
        buffers
    )
    ready, q_full, q_free, dout_full, dout_free, p_full, p_free, read = barriers
    stages, block_q, _ = q_smem.shape
    me = lax.axis_index("warpgroup")
    batch, kv_head, block = place_keys(lax.axis_index("program"), c, ROWS)
    blocks = query_blocks(
        batch, block, lengths_ref, offset_ref, bounds_ref, c, ROWS, block_q
    )
    first, _, _, last = blocks
    count = last - first
    row = block * ROWS
    keys = pl.ds(row, ROWS)

    def slot_of(ring, j, member):
        return lax.rem(member * count + j - first, jnp.int32(ring.shape[0]))

    def all_blocks(step, carry):
        ragged = lengths_ref is not None or c.s % ROWS != 0
        bounded = bounds_ref is not None

        def head(member, carry):
            return walk(
                functools.partial(step, member=member),
                carry,
                blocks,
                begins=c.causal or bounded,
                ends=ragged or c.window is not None or bounded,
            )

        return lax.fori_loop(0, c.group, head, carry)

    @pl.when(me == CONSUMERS)
    def load():
        plgpu.set_max_registers(24, action="decrease")
        plgpu.copy_gmem_to_smem(k_ref.at[batch, keys, kv_head], k_smem, ready.at[0])
        plgpu.copy_gmem_to_smem(v_ref.at[batch, keys, kv_head], v_smem, ready.at[1])

        def step(j, _):
            head = kv_head * c.group + lax.div(j, count)
            slot = lax.rem(j, jnp.int32(stages))
            rows = pl.ds((first + lax.rem(j, count)) * block_q, block_q)
            plgpu.barrier_wait(q_free.at[slot])
            of_q = [
                (q_ref.at[batch, rows, head], q_smem),
                (lse2_ref.at[batch, head, rows], lse2_smem),
            ]
            if bias_smem is not None:
                at = own(bias_ref, batch, head)
                of_q.append((bias_ref.at[*at, rows, keys], bias_smem))
            for source, target in of_q:
                plgpu.copy_gmem_to_smem(source, target.at[slot], q_full.at[slot])
            plgpu.barrier_wait(dout_free.at[slot])
            for source, target in (
                (dout_ref.at[batch, rows, head], dout_smem),
                (delta_ref.at[batch, head, rows], delta_smem),
            ):
                plgpu.copy_gmem_to_smem(source, target.at[slot], dout_full.at[slot])

        lax.fori_loop(0, count * c.group, step, None)
        for slot in range(stages):
            plgpu.barrier_wait(q_free.at[slot])
            plgpu.barrier_wait(dout_free.at[slot])

    def begin():
        plgpu.set_max_registers(240, action="increase")
        for slot in range(stages):
            plgpu.barrier_arrive(q_free.at[slot])
            plgpu.barrier_arrive(dout_free.at[slot])
        plgpu.barrier_wait(ready.at[me])

    def finish(x, staged, target):
        staged[...] = x.astype(target.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, target.at[batch, keys, kv_head])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(me == 0)
    def weigh():
        begin()
        offset, length = position_and_length(batch, lengths_ref, offset_ref, c)
        kv_ids = None
        if kv_ids_ref is not None:
            ids = kv_ids_ref.at[batch, keys]
            kv_ids = plgpu.load(ids, layout=BY_ROW, optimized=False)

        def step(j, dv, masked, member):
            slot, p_slot = slot_of(q_smem, j, member), slot_of(p_smem, j, member)
            plgpu.barrier_wait(q_full.at[slot])
            s = product(k_smem, q_smem.at[slot].transpose((1, 0)))
            lse2 = plgpu.load(lse2_smem.at[slot], layout=BY_COLUMN)
            seen = bias = None
            query, n = j * block_q, kv_head * c.group + member
            if bias_smem is not None:
                bias = copied_bias(bias_smem.at[slot], turned=True)
            elif bias_ref is not None:
                bias = bias_tile(bias_ref, batch, n, row, query, s.shape)
            plgpu.barrier_arrive(q_free.at[slot])
            if masked:
                seen = visible(s.shape, 0, row, query, offset, length, c)
                if kv_ids is not None:
                    ids = q_ids_ref.at[batch, pl.ds(query, block_q)]
                    seen = jnp.logical_and(seen, same_ids(kv_ids, ids, s.shape))
                if words_ref is not None:
                    bits = is_set(words_ref, batch, n, row, query, s.shape)
                    seen = jnp.logical_and(seen, bits)
            p, bent = weights(s, bias, by_column(lse2, s.shape), seen, c)
            slope = p if bent is None else p * (1.0 - bent * bent)
            plgpu.barrier_wait(p_free.at[p_slot])
            p_smem.at[p_slot][...] = slope.astype(jnp.float16)
            plgpu.barrier_arrive(p_full.at[p_slot])
            plgpu.barrier_wait(dout_full.at[slot])
            (dv,) = accumulated(
                [dv], [(p.astype(q_ref.dtype), dout_smem.at[slot])], interpret
            )
            plgpu.barrier_arrive(dout_free.at[slot])
            return dv

        dv = all_blocks(step, zeros((ROWS, c.hv)))
        for slot in range(p_smem.shape[0]):
            plgpu.barrier_wait(p_free.at[slot])
        plgpu.barrier_wait(read)  # before dv lies where the values lay
        finish(dv * 2.0**-SHIFT, v_smem, dv_ref)

    @pl.when(me == 1)
    def slope():
        begin()
        for slot in range(p_smem.shape[0]):
            plgpu.barrier_arrive(p_free.at[slot])

        def step(j, dk, masked, member):
            del masked
            slot, p_slot = slot_of(q_smem, j, member), slot_of(p_smem, j, member)
            plgpu.barrier_wait(dout_full.at[slot])
            dp = product(v_smem, dout_smem.at[slot].transpose((1, 0)))
            delta = plgpu.load(delta_smem.at[slot], layout=BY_COLUMN)
            plgpu.barrier_arrive(dout_free.at[slot])
            plgpu.barrier_wait(p_full.at[p_slot])
            p = plgpu.load(p_smem.at[p_slot], layout=WGMMA)
            plgpu.barrier_arrive(p_free.at[p_slot])
            ds = scaled_slopes(p, dp, delta)
            plgpu.barrier_wait(q_full.at[slot])
            (dk,) = accumulated(
                [dk], [(ds.astype(q_ref.dtype), q_smem.at[slot])], interpret
            )
            plgpu.barrier_arrive(q_free.at[slot])
            return dk

        dk = all_blocks(step, zeros((ROWS, c.h)))
        plgpu.barrier_arrive(read)
        finish(dk * dscale(c), k_smem, dk_ref)


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
    slopes_ref,
    buffers,
    barriers,
    *,
    c: Problem,
    interpret: bool,
):
    q_smem, dout_smem, k_smem, v_smem, bias_smem, slopes_smem = buffers
    ready, k_full, k_free, v_full, v_free = barriers
    free = [k_free] if v_free is None else [k_free, v_free]
    me = lax.axis_index("warpgroup")
    batch, head, block = place(lax.axis_index("program"), c)
    blocks = in_order(*key_blocks(batch, block, lengths_ref, offset_ref, bounds_ref, c))
    first, _, _, last = blocks

    def slot_of(ring, j):
        return lax.rem(j, jnp.int32(ring.shape[0]))

    @pl.when(me == CONSUMERS)
    def load():
        plgpu.set_max_registers(24, action="decrease")
        for w in range(CONSUMERS):
            rows = pl.ds((block * CONSUMERS + w) * ROWS, ROWS)
            for source, target in ((q_ref, q_smem), (dout_ref, dout_smem)):
                plgpu.copy_gmem_to_smem(
                    source.at[batch, rows, head], target.at[w], ready.at[w]
                )

        def step(j, _):
            keys = pl.ds((first + j) * c.block_k, c.block_k)
            source = (batch, keys, lax.div(head, jnp.int32(c.group)))
            slot = slot_of(k_smem, j)
            plgpu.barrier_wait(k_free.at[slot])
            plgpu.copy_gmem_to_smem(k_ref.at[source], k_smem.at[slot], k_full.at[slot])
            full = k_full if v_full is None else v_full
            slot = slot_of(v_smem, j)
            if v_free is not None:
                plgpu.barrier_wait(v_free.at[slot])
            plgpu.copy_gmem_to_smem(v_ref.at[source], v_smem.at[slot], full.at[slot])
            if bias_smem is not None:
                for w in range(CONSUMERS):
                    rows = pl.ds((block * CONSUMERS + w) * ROWS, ROWS)
                    plgpu.copy_gmem_to_smem(
                        bias_ref.at[*own(bias_ref, batch, head), rows, keys],
                        bias_smem.at[slot, w],
                        full.at[slot],
                    )

        lax.fori_loop(0, last - first, step, None)
        for ring in free:
            for slot in range(ring.shape[0]):
                plgpu.barrier_wait(ring.at[slot])

    @pl.when(me < CONSUMERS)
    def differentiate():
        plgpu.set_max_registers(240, action="increase")
        for ring in free:
            for slot in range(ring.shape[0]):
                plgpu.barrier_arrive(ring.at[slot])
        offset, length = position_and_length(batch, lengths_ref, offset_ref, c)
        row = (block * CONSUMERS + me) * ROWS
        rows = pl.ds(row, ROWS)
        lse2, delta = (
            plgpu.load(x.at[batch, head, rows], layout=BY_ROW, optimized=False)
            for x in (lse2_ref, delta_ref)
        )
        plgpu.barrier_wait(ready.at[me])

        q_ids = None
        if q_ids_ref is not None:
            ids = q_ids_ref.at[batch, rows]
            q_ids = plgpu.load(ids, layout=BY_ROW, optimized=False)

        def step(j, dq, masked):
            k_slot, v_slot = slot_of(k_smem, j - first), slot_of(v_smem, j - first)
            k, v = k_smem.at[k_slot], v_smem.at[v_slot]
            plgpu.barrier_wait(k_full.at[k_slot])
            if v_full is not None:
                plgpu.barrier_wait(v_full.at[v_slot])
            held = opaque(me) if c.h + c.hv > NARROW else me
            s, dp = two_products(
                q_smem.at[held],
                k.transpose((1, 0)),
                dout_smem.at[held],
                v.transpose((1, 0)),
            )
            seen = bias = None
            key = j * c.block_k
            if bias_smem is not None:
                bias = copied_bias(bias_smem.at[v_slot, me])
            elif bias_ref is not None:
                bias = bias_tile(bias_ref, batch, head, row, key, s.shape)
            if v_free is not None:
                plgpu.barrier_arrive(v_free.at[v_slot])
            if masked:
                seen = visible(s.shape, 1, key, row, offset, length, c)
                if q_ids is not None:
                    ids = kv_ids_ref.at[batch, pl.ds(key, c.block_k)]
                    seen = jnp.logical_and(seen, same_ids(q_ids, ids, s.shape))
                if words_ref is not None:
                    bits = is_set(words_ref, batch, head, row, key, s.shape)
                    seen = jnp.logical_and(seen, bits)
            p, bent = weights(s, bias, by_row(lse2, s.shape), seen, c)
            ds = p * (dp - by_row(delta, s.shape))
            if slopes_ref is not None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                store_slopes(ds, j)
            if bent is not None:
                ds = ds * (1.0 - bent * bent)
            (dq,) = accumulated([dq], [(ds.astype(q_ref.dtype), k)], interpret)
            plgpu.barrier_arrive(k_free.at[k_slot])
            return dq

        def copy_slopes(j, _):
            keys = pl.ds(j * c.block_k, c.block_k)
            plgpu.copy_smem_to_gmem(
                slopes_smem.at[me], slopes_ref.at[batch, head, rows, keys]
            )

        def store_slopes(ds, j):
            slopes_smem.at[me][...] = ds.astype(slopes_ref.dtype)
            plgpu.commit_smem()
            copy_slopes(j, None)

        if slopes_ref is not None:  # blocks that no loop visits
            slopes_smem.at[me][...] = zeros((ROWS, c.block_k)).astype(slopes_ref.dtype)
            plgpu.commit_smem()
            end = -(-c.s // c.block_k)
            lax.fori_loop(0, first, copy_slopes, None)
            lax.fori_loop(last, end, copy_slopes, None)

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


def matrix(dtype, block: int, *shape: int):
    """Shared memory of 16 bits; `block` is the least number of rows contracted over."""
    transforms = tiled(block, shape[-1], contract_rows=True)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def slots(stages: int, arrivals: int):
    return plgpu.Barrier(num_barriers=stages, num_arrivals=arrivals)


def keys_plan(h: int, hv: int, bias_bytes: int) -> dict[str, int]:
    """KEYS of a program, BLOCK_Q walked over, STAGES of them; by what fits.

    dk and dv of 64 keys take (h + hv) / 2 registers of a consumer, S and dP of a block
    32 each. With 64 keys a program the consumers share them.
    """
    more = NARROW < h + hv <= 320 and not bias_bytes
    keys = KEYS if h + hv <= 320 else ROWS
    return dict(KEYS=keys, BLOCK_Q=BLOCK, STAGES=STAGES + more)


def keys_scratch(c: Problem, dtype, bias, KEYS: int, BLOCK_Q: int, STAGES: int):
    """(buffers, barriers, whether the bias comes through shared memory)."""
    wide = KEYS == ROWS
    ring = STAGES, BLOCK_Q
    held = (ROWS,) if wide else (CONSUMERS, ROWS)
    used = 2 * (KEYS + STAGES * BLOCK_Q) * (c.h + c.hv) + 8 * STAGES * BLOCK_Q
    used += 2 * P_SLOTS * KEYS * BLOCK_Q if wide else 0
    tile = STAGES * BLOCK_Q * KEYS * pair_bytes(bias)
    copied = 0 < tile <= SHARED_BYTES - used
    buffers = [
        matrix(dtype, BLOCK_Q, *held, c.h),
        matrix(dtype, BLOCK_Q, *held, c.hv),
        matrix(dtype, BLOCK_Q, *ring, c.h),
        matrix(dtype, BLOCK_Q, *ring, c.hv),
        plgpu.SMEM(ring, jnp.float32),
        plgpu.SMEM(ring, jnp.float32),
    ]
    consumers = () if wide else (CONSUMERS,)
    tiles = None
    if copied:
        tiles = bias_tiles(bias.dtype, STAGES, *consumers, BLOCK_Q, ROWS)
    if not wide:
        copies = 4 + CONSUMERS * copied
        full, free = slots(STAGES, copies), slots(STAGES, CONSUMERS)
        return (*buffers, tiles), (slots(CONSUMERS, 2), full, free), copied
    exchanged = bias_tiles(jnp.dtype(jnp.float16), P_SLOTS, ROWS, BLOCK_Q)
    free, one = slots(STAGES, CONSUMERS), slots(P_SLOTS, 1)
    rings = slots(STAGES, 2 + copied), free, slots(STAGES, 2), free, one, one
    return (
        (*buffers, exchanged, tiles),
        (slots(CONSUMERS, 1), *rings, plgpu.Barrier()),
        copied,
    )


def queries_scratch(c: Problem, dtype, bias, want_slopes: bool):
    """As keys_scratch. What is wide has one stage of values, or of both."""
    size = pair_bytes(bias)
    tile = c.block_q * BLOCK
    used = 2 * c.block_q * (c.h + c.hv)
    used += tile * bias.dtype.itemsize if want_slopes else 0
    for copied, k_stages, v_stages in (
        (size > 0, 2, 2),
        (size > 0, 2, 1),
        (size > 0, 1, 1),
        (False, 1, 1),
    ):
        ring = 2 * BLOCK * (k_stages * c.h + v_stages * c.hv)
        ring += v_stages * tile * size if copied else 0
        if used + ring <= SHARED_BYTES:
            break
    pair = CONSUMERS, ROWS
    buffers = (
        matrix(dtype, BLOCK, *pair, c.h),
        matrix(dtype, BLOCK, *pair, c.hv),
        matrix(dtype, BLOCK, k_stages, BLOCK, c.h),
        matrix(dtype, BLOCK, v_stages, BLOCK, c.hv),
        bias_tiles(bias.dtype, v_stages, *pair, BLOCK) if copied else None,
        bias_tiles(bias.dtype, *pair, BLOCK) if want_slopes else None,
    )
    beside = 1 + CONSUMERS * copied  # copies of values and of the bias
    if k_stages == v_stages:  # one ring: they come and go with the keys
        rings = slots(k_stages, 1 + beside), slots(k_stages, CONSUMERS), None, None
    else:
        rings = (
            slots(k_stages, 1),
            slots(k_stages, CONSUMERS),
            slots(v_stages, beside),
            slots(v_stages, CONSUMERS),
        )
    return buffers, (slots(CONSUMERS, 2), *rings), copied


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
    """(dq, dk, dv, dS, dsinks); `interpret` runs the kernels on a CPU."""
    c = problem(query, key, value, bias, scale, causal, window, softcap)
    # With block_q = CONSUMERS * ROWS and one tile a program.
    c = dataclasses.replace(c, consumers=CONSUMERS, block_k=BLOCK)
    lse2, delta, dsinks = rows_of(c, sinks, out, lse, dout, dlse, wanted[4])
    q_ids, kv_ids = int32(q_segment_ids), int32(kv_segment_ids)
    key, value = without_rest(key, kv_lengths), without_rest(value, kv_lengths)
    operands = (
        copyable(query, ROWS),
        copyable(key, ROWS),
        copyable(value, ROWS),
        copyable(dout.astype(query.dtype), ROWS),
    )
    q, k, v, _ = operands
    ids = None, None
    if q_ids is not None and kv_ids is not None:  # whole tiles of every kernel
        ids = padded_rows(q_ids, c.block_q), padded_rows(kv_ids, KEYS)

    def pairs(held: int, block: int, turned: bool, copied: bool):
        """Bias, words and bounds of a kernel that holds keys (`turned`) or queries."""
        bounds = words = own_bias = None
        if q_ids is not None and kv_ids is not None:
            both = (kv_ids, q_ids) if turned else (q_ids, kv_ids)
            bounds = segment_bounds(*both, held, block)
        if mask is not None:
            shown = jnp.swapaxes(mask, 2, 3) if turned else mask
            lengths = (c.s, c.t) if turned else (c.t, c.s)
            words = mask_words(shown, *lengths, held, block)
            bounds = inside_both(bounds, word_bounds(words, c.b, held, block))
        if bias is not None and copied and turned:
            own_bias = whole_blocks(bias, block, held)
        elif bias is not None:
            own_bias = whole_blocks(
                jnp.swapaxes(bias, 2, 3) if turned else bias, held, block
            )
        return own_bias, words, bounds

    def launch(kernel, like, programs, buffers, barriers, lse2, pairs):
        return plgpu.kernel(
            functools.partial(kernel, c=c, interpret=interpret),
            out_type=tuple(
                x if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like
            ),
            grid=(programs,),
            grid_names=("program",),
            num_threads=CONSUMERS + 1,
            thread_name="warpgroup",
            scratch_types=(buffers, barriers),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=plgpu.InterpretGPUParams() if interpret else None,
        )(*operands, lse2, delta, *ids, *pairs, int32(kv_lengths), int32(q_offset))

    dq = dk = dv = slopes = None
    if wanted[1] or wanted[2]:
        found = tuned(
            "hopper_flash_attention_bwd_keys",
            next_power_of_2(max(c.h, c.hv)),
            query.dtype,
            keys_plan(c.h, c.hv, pair_bytes(bias)),
        )
        buffers, barriers, copied = keys_scratch(c, query.dtype, bias, **found)
        keys, block = found["KEYS"], found["BLOCK_Q"]
        shared, in_turn = keys == ROWS, c.h + c.hv > NARROW
        dk, dv = launch(
            wide_keys_kernel
            if shared
            else functools.partial(keys_kernel, in_turn=in_turn),
            (k, v),
            -(-c.s // keys) * c.b * (c.n // c.group),
            buffers,
            barriers,
            lse2 - SHIFT if shared or in_turn else lse2,
            pairs(keys, block, True, copied),
        )
        dk, dv = dk[:, : c.s], dv[:, : c.s]
    if wanted[0] or wanted[3]:
        if wanted[3]:
            shape = c.b, c.n, q.shape[1], -(-c.s // BLOCK) * BLOCK
            slopes = jax.ShapeDtypeStruct(shape, bias.dtype)
        buffers, barriers, copied = queries_scratch(c, query.dtype, bias, wanted[3])
        dq, slopes = launch(
            queries_kernel,
            (q, slopes),
            c.tiles,
            buffers,
            barriers,
            lse2,
            pairs(c.block_q, BLOCK, False, copied),
        )
        dq = dq[:, : c.t]
        if slopes is not None:
            slopes = slopes[:, :, : c.t, : c.s]
    return dq, dk, dv, slopes, dsinks
