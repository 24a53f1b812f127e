"""dq of attention on Hopper, and dS: programs hold queries and walk over keys."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.attention.blocks import key_blocks, place, position_and_length
from jaxkern.pallas.attention.gradient_blocks import (
    CONSUMERS,
    NARROW,
    accumulated,
    dscale,
    in_order,
    inside,
    shown,
    store,
    sum_of,
    two_products,
    visible,
    walk,
    walk_part,
    weights,
    zeros,
)
from jaxkern.pallas.attention.pairs import (
    BY_ROW,
    bias_tile,
    copied_bias,
    own,
)
from jaxkern.pallas.attention.problem import ROWS, Problem
from jaxkern.pallas.attention.wgmma import (
    by_row,
    finished_sum,
    issue_sum,
    opaque,
    set_sum,
)


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
    """dq of c.block_q queries, 64 in each consumer, and dS of their pairs if wanted."""
    q_smem, dout_smem, k_smem, v_smem, bias_smem, slopes_smem = buffers
    ready, k_full, k_free, v_full, v_free = barriers
    free = [k_free] if v_free is None else [k_free, v_free]
    me = lax.axis_index("warpgroup")
    batch, head, block = place(lax.axis_index("program"), c)

    def blocks_of(consumer):
        at = batch, block, lengths_ref, offset_ref, bounds_ref
        return in_order(*key_blocks(*at, c, consumer))

    blocks = blocks_of(None)
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

        part = inside(blocks, blocks_of(me))
        q_ids = None
        if q_ids_ref is not None:
            ids = q_ids_ref.at[batch, rows]
            q_ids = plgpu.load(ids, layout=BY_ROW, optimized=False)

        def slot_at(j):
            return slot_of(k_smem, j - first), slot_of(v_smem, j - first)

        def keys_and_values(j):
            """Of a block, when they are there."""
            k_slot, v_slot = slot_at(j)
            plgpu.barrier_wait(k_full.at[k_slot])
            if v_full is not None:
                plgpu.barrier_wait(v_full.at[v_slot])
            return k_smem.at[k_slot], v_smem.at[v_slot]

        def weights_of(s, j, masked):
            seen = bias = None
            key, v_slot = j * c.block_k, slot_at(j)[1]
            if bias_smem is not None:
                bias = copied_bias(bias_smem.at[v_slot, me])
            elif bias_ref is not None:
                bias = bias_tile(bias_ref, batch, head, row, key, s.shape)
            if v_free is not None:
                plgpu.barrier_arrive(v_free.at[v_slot])
            if masked:
                seen = visible(s.shape, 1, key, row, offset, length, c)
                at = batch, head, row, key
                seen = shown(seen, q_ids, kv_ids_ref, words_ref, *at)
            return weights(s, bias, by_row(lse2, s.shape), seen, c)

        def slopes_of(p, bent, dp, j):
            """dS of S before the cap."""
            ds = p * (dp - by_row(delta, dp.shape))
            if slopes_ref is not None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                store_slopes(ds, j)
            if bent is not None:
                ds = ds * (1.0 - bent * bent)
            return ds.astype(q_ref.dtype)

        def slopes_at_once(j, masked):
            k, v = keys_and_values(j)
            held = opaque(me) if c.h + c.hv > NARROW else me
            s, dp = two_products(
                q_smem.at[held],
                k.transpose((1, 0)),
                dout_smem.at[held],
                v.transpose((1, 0)),
            )
            return slopes_of(*weights_of(s, j, masked), dp, j)

        def add(j, dq, ds):
            k_slot, _ = slot_at(j)
            (dq,) = accumulated([dq], [(ds, k_smem.at[k_slot])], interpret)
            plgpu.barrier_arrive(k_free.at[k_slot])
            return dq

        def step(j, dq, masked):
            return add(j, dq, slopes_at_once(j, masked))

        def await_keys(j):
            @pl.when(j < part[3])
            def wait():
                keys_and_values(j)

        def step_behind(j, carry, masked):
            """The product for dq of the block before lies under the exponentials."""
            dq, before = carry
            k_slot_before, _ = slot_at(j - 1)
            k_before = k_smem.at[k_slot_before]
            k_slot, v_slot = slot_at(j)
            k, v = k_smem.at[k_slot], v_smem.at[v_slot]

            def products(s_acc, dp_acc, dq_acc):
                set_sum(dq_acc, dq, interpret)
                plgpu.wgmma(s_acc, q_smem.at[me], k.transpose((1, 0)))
                issue_sum(dq_acc, before, k_before, interpret)
                plgpu.wgmma(dp_acc, dout_smem.at[me], v.transpose((1, 0)))
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=2)
                p, bent = weights_of(s, j, masked)
                await_keys(j + 1)
                dp = dp_acc[...]
                summed = finished_sum(dq_acc, dq, before, k_before, interpret)
                return summed, p, bent, dp

            square = sum_of((ROWS, c.block_k))
            dq, p, bent, dp = pl.run_scoped(products, square, square, sum_of(dq.shape))
            plgpu.barrier_arrive(k_free.at[k_slot_before])
            return dq, slopes_of(p, bent, dp, j)

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
            lax.fori_loop(0, part[0], copy_slopes, None)
            lax.fori_loop(part[3], end, copy_slopes, None)

        def skip(j, _):
            k_slot, v_slot = slot_at(j)
            keys_and_values(j)
            plgpu.barrier_arrive(k_free.at[k_slot])
            if v_free is not None:
                plgpu.barrier_arrive(v_free.at[v_slot])

        def walk_behind(dq, begins, ends):
            start, whole, whole_end, stop = part
            second = lax.min(start + 1, stop)

            def first_block(j, _):
                return slopes_at_once(j, begins or ends)

            none = zeros((ROWS, c.block_k)).astype(q_ref.dtype)
            lax.fori_loop(first, start, skip, None)
            ds = lax.fori_loop(start, second, first_block, none)
            await_keys(second)
            others = in_order(second, whole, whole_end, stop)
            carry = walk(step_behind, (dq, ds), others, begins, ends)
            dq = lax.fori_loop(
                lax.max(start, stop - 1),
                stop,
                lambda j, dq: add(j, dq, carry[1]),
                carry[0],
            )
            lax.fori_loop(stop, last, skip, None)
            return dq

        ragged = lengths_ref is not None or c.s % c.block_k != 0
        bounded = bounds_ref is not None
        begins, ends = c.window is not None or bounded, c.causal or ragged or bounded
        dq = zeros((ROWS, c.h))
        if k_smem.shape[0] <= 2:
            dq = walk_part(step, skip, dq, blocks, part, begins=begins, ends=ends)
        else:
            dq = walk_behind(dq, begins, ends)
        store(dq * dscale(c), q_smem.at[me], dq_ref.at[batch, rows, head])
        plgpu.wait_smem_to_gmem(0)
