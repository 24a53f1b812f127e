"""dk and dv of attention on Hopper: programs hold keys and walk over queries."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.attention.blocks import position_and_length
from jaxkern.pallas.attention.gradient_blocks import (
    CONSUMERS,
    KEYS,
    SHIFT,
    accumulated,
    by_column,
    dscale,
    place_keys,
    product,
    query_blocks,
    same_ids,
    scaled_slopes,
    slopes,
    sum_of,
    two_products,
    visible,
    walk,
    weights,
    zeros,
)
from jaxkern.pallas.attention.pairs import (
    BY_COLUMN,
    BY_ROW,
    bias_tile,
    copied_bias,
    is_set,
    own,
)
from jaxkern.pallas.attention.problem import ROWS, Problem
from jaxkern.pallas.attention.wgmma import (
    WGMMA,
    finished_sum,
    issue_sum,
    opaque,
    set_sum,
)


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
