"""keys_kernel for head dims whose sums are too wide for one consumer."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.attention.attention.blocks import position_and_length
from jaxkern.pallas.attention.attention.gradient_blocks import (
    CONSUMERS,
    SHIFT,
    accumulated,
    by_column,
    dscale,
    place_keys,
    product,
    query_blocks,
    scaled_slopes,
    shown,
    store,
    visible,
    walk_heads,
    weights,
    zeros,
)
from jaxkern.pallas.attention.attention.pairs import (
    BY_COLUMN,
    BY_ROW,
    bias_tile,
    copied_bias,
    own,
)
from jaxkern.pallas.attention.attention.problem import ROWS, Problem
from jaxkern.pallas.attention.attention.wgmma import WGMMA


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
    """dk and dv of ROWS keys.

    One consumer computes P and dv, the other dP, dS and dk. P goes from one to the
    other, in float32 where there is room and operands are float16, else in float16,
    times 2^SHIFT so that this holds it to 11 bits however small it is. `lse2` is less
    by SHIFT for that. No product is computed twice.
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

    def walk_all(step, carry):
        return walk_heads(step, carry, blocks, lengths_ref, bounds_ref, c, ROWS)

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
        store(x, staged, target.at[batch, keys, kv_head])
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
                seen = visible(s.shape, 0, row, query, offset, length, c, interpret)
                seen = shown(seen, kv_ids, q_ids_ref, words_ref, batch, n, row, query)
            p, bent = weights(s, bias, by_column(lse2, s.shape), seen, c)
            slope = p if bent is None else p * (1.0 - bent * bent)
            plgpu.barrier_wait(p_free.at[p_slot])
            p_smem.at[p_slot][...] = slope.astype(p_smem.dtype)
            plgpu.barrier_arrive(p_full.at[p_slot])
            plgpu.barrier_wait(dout_full.at[slot])
            (dv,) = accumulated(
                [dv], [(p.astype(q_ref.dtype), dout_smem.at[slot])], interpret
            )
            plgpu.barrier_arrive(dout_free.at[slot])
            return dv

        dv = walk_all(step, zeros((ROWS, c.hv)))
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

        dk = walk_all(step, zeros((ROWS, c.h)))
        plgpu.barrier_arrive(read)
        finish(dk * dscale(c), k_smem, dk_ref)
