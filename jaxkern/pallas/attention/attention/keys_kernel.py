"""dk and dv of attention on Hopper: programs hold keys and walk over queries."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.attention.attention.blocks import position_and_length
from jaxkern.pallas.attention.attention.gradient_blocks import (
    CONSUMERS,
    KEYS,
    SHIFT,
    accumulated,
    by_column,
    dscale,
    inside,
    product,
    query_blocks,
    scaled_slopes,
    shown,
    slopes,
    store,
    sum_of,
    two_products,
    visible,
    walk_heads,
    weights,
    zeros,
)
from jaxkern.pallas.attention.attention.keys_share import Share
from jaxkern.pallas.attention.attention.pairs import (
    BY_COLUMN,
    BY_ROW,
    bias_tile,
    copied_bias,
    own,
)
from jaxkern.pallas.attention.attention.problem import ROWS, Problem
from jaxkern.pallas.attention.attention.wgmma import (
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
    whole: int,
    in_turn: bool = False,
):
    """dk and dv of KEYS keys, 64 in each consumer; behind the first `whole` programs of
    half of them, as Share has it.

    `in_turn`: dP is computed when P has been rounded and dv added to, as registers have
    no room for both. P is then scaled as in wide_keys_kernel.
    """
    k_smem, v_smem, q_smem, dout_smem, lse2_smem, delta_smem = buffers[:6]
    bias_smem, sum_smem = buffers[6:]
    ready, full, free, written, read = barriers
    stages, block_q, _ = q_smem.shape
    me = lax.axis_index("warpgroup")
    share = Share(lax.axis_index("program"), whole, sum_smem is not None, c)
    batch, kv_head, block = share.batch, share.kv_head, share.block

    def blocks_of(part):
        at = batch, block, lengths_ref, offset_ref, bounds_ref
        return query_blocks(*at, c, KEYS, block_q, part)

    blocks = blocks_of(None)
    if share.halves:
        blocks = tuple(map(share.either, blocks, blocks_of(share.which)))
    first, _, _, last = blocks
    count = last - first

    @pl.when(me == CONSUMERS)
    def load():
        plgpu.set_max_registers(24, action="decrease")
        for w in range(CONSUMERS):
            rows = pl.ds(share.row(w), ROWS)
            for source, target in ((k_ref, k_smem), (v_ref, v_smem)):
                plgpu.copy_gmem_to_smem(
                    source.at[batch, rows, kv_head], target.at[w], ready.at[w]
                )

        def step(i, _):
            slot = lax.rem(i, jnp.int32(stages))
            whose, j = share.from_ring(i)
            head = share.head(whose, lax.div(j, count))
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
        row = share.row(me)
        kv_ids = None
        if kv_ids_ref is not None:
            ids = kv_ids_ref.at[batch, pl.ds(row, ROWS)]
            kv_ids = plgpu.load(ids, layout=BY_ROW, optimized=False)

        def weights_of(s, lse2, slot, j, masked, member):
            seen = bias = None
            query, n = j * block_q, share.head(me, member)
            if bias_smem is not None:
                bias = copied_bias(bias_smem.at[slot, me], turned=True)
            elif bias_ref is not None:
                bias = bias_tile(bias_ref, batch, n, row, query, s.shape)
            if masked:
                seen = visible(s.shape, 0, row, query, offset, length, c, interpret)
                seen = shown(seen, kv_ids, q_ids_ref, words_ref, batch, n, row, query)
            return weights(s, bias, by_column(lse2, s.shape), seen, c)

        def slot_of(member, j):
            i = share.in_ring(me, member * count + j - first)
            return lax.rem(i, jnp.int32(stages))

        def step(j, sums, masked, member):
            slot = slot_of(member, j)
            plgpu.barrier_wait(full.at[slot])
            q, dout = q_smem.at[slot], dout_smem.at[slot]
            # Behind the products it would wait for each of these loads in turn.
            lse2 = plgpu.load(lse2_smem.at[slot], layout=BY_COLUMN)
            delta = plgpu.load(delta_smem.at[slot], layout=BY_COLUMN)

            held = opaque(jnp.int32(me))  # no descriptors that would be spilled
            s, dp = two_products(
                k_smem.at[held],
                q.transpose((1, 0)),
                v_smem.at[held],
                dout.transpose((1, 0)),
            )
            p, bent = weights_of(s, lse2, slot, j, masked, member)
            ds = slopes(p, dp, by_column(delta, dp.shape), bent)
            dtype = q_ref.dtype
            sums = accumulated(
                sums, [(p.astype(dtype), dout), (ds.astype(dtype), q)], interpret
            )
            share.release(free.at[slot])
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
            def release_before():
                plgpu.barrier_arrive(free.at[slot_before])

            (dv,) = accumulated([dv], [(p, dout)], interpret)
            dp = product(v_smem.at[held], dout.transpose((1, 0)))
            delta = plgpu.load(delta_smem.at[slot], layout=BY_COLUMN)
            return dv, dk, scaled_slopes(curve, dp, delta).astype(q_ref.dtype)

        def skip(j, _, member):
            slot = slot_of(member, j)
            plgpu.barrier_wait(full.at[slot])
            share.release(free.at[slot])

        def walk_all(step, carry, part=None):
            at = blocks, lengths_ref, bounds_ref, c, KEYS
            return walk_heads(step, carry, *at, share.members, part, skip)

        start = [zeros((ROWS, c.hv)), zeros((ROWS, c.h))]
        if in_turn:
            none = zeros((ROWS, block_q)).astype(q_ref.dtype)
            dv, dk, ds = walk_all(step_in_turn, (*start, none))
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
            part = inside(blocks, blocks_of(share.part(me)))
            sums = walk_all(step, start, part)
            dv, dk = share.summed(me, sums, sum_smem, written, read)

        @pl.when(share.stores(me))
        def results():
            mine = batch, pl.ds(row, ROWS), kv_head
            store(dk * dscale(c), k_smem.at[me], dk_ref.at[mine])
            store(dv, v_smem.at[me], dv_ref.at[mine])
            plgpu.wait_smem_to_gmem(0)
