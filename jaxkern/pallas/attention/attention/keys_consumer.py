"""The warpgroups of the keys kernel that compute: dk and dv of 64 keys each.

S and dP are transposed, [64, block_q], so that P and dS are in the registers in which
WGMMA takes them; dk is [64, h] and dv [64, hv], in registers too.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.attention.attention.blocks import position_and_length
from jaxkern.pallas.attention.attention.gradient_blocks import (
    KEYS,
    SHIFT,
    accumulated,
    by_column,
    dscale,
    inside,
    product,
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
from jaxkern.pallas.attention.attention.keys_tiles import Program
from jaxkern.pallas.attention.attention.pairs import (
    BY_COLUMN,
    BY_ROW,
    bias_tile,
    copied_bias,
)
from jaxkern.pallas.attention.attention.problem import ROWS
from jaxkern.pallas.attention.attention.wgmma import (
    finished_sum,
    issue_sum,
    opaque,
    set_sum,
)


def differentiate(program: Program, me: Any, in_turn: bool) -> None:
    """The sums of a consumer, and their way to memory."""
    consumer = Consumer(program, me)
    dv, dk = consumer.summed_in_turn() if in_turn else consumer.summed()
    refs, buffers = program.refs, program.buffers

    @pl.when(program.share.stores(me))
    def results():
        mine = program.batch, pl.ds(consumer.row, ROWS), program.kv_head
        store(dk * dscale(program.c), buffers.k.at[me], refs.dk.at[mine])
        store(dv, buffers.v.at[me], refs.dv.at[mine])
        plgpu.wait_smem_to_gmem(0)


class Consumer:
    """The keys of a consumer, which begin at `row`.

    A block of queries is `j`, of the head `member` of the group.
    """

    def __init__(self, program: Program, me: Any):
        refs, barriers = program.refs, program.barriers
        self.program, self.me, self.share = program, me, program.share
        self.refs, self.buffers, self.barriers = refs, program.buffers, barriers
        self.c, self.interpret = program.c, program.interpret
        plgpu.set_max_registers(240, action="increase")
        for slot in range(program.stages):
            plgpu.barrier_arrive(barriers.free.at[slot])
        plgpu.barrier_wait(barriers.ready.at[me])
        self.offset, self.length = position_and_length(
            program.batch, refs.lengths, refs.offset, self.c
        )
        self.row = self.share.row(me)
        self.kv_ids = None
        if refs.kv_ids is not None:
            ids = refs.kv_ids.at[program.batch, pl.ds(self.row, ROWS)]
            self.kv_ids = plgpu.load(ids, layout=BY_ROW, optimized=False)

    def weights_of(self, s, lse2, slot, j, masked, member):
        """(P, tanh of the cap or None)."""
        seen = bias = None
        batch, refs = self.program.batch, self.refs
        query, n = j * self.program.block_q, self.share.head(self.me, member)
        if self.buffers.bias is not None:
            bias = copied_bias(self.buffers.bias.at[slot, self.me], turned=True)
        elif refs.bias is not None:
            bias = bias_tile(refs.bias, batch, n, self.row, query, s.shape)
        if masked:
            ends = self.row, query, self.offset, self.length
            seen = visible(s.shape, 0, *ends, self.c, self.interpret)
            where = batch, n, self.row, query
            seen = shown(seen, self.kv_ids, refs.q_ids, refs.words, *where)
        return weights(s, bias, by_column(lse2, s.shape), seen, self.c)

    def walk_all(self, step, carry, part=None):
        at = self.program.blocks, self.refs.lengths, self.refs.bounds, self.c, KEYS
        return walk_heads(step, carry, *at, self.share.members, part, self.skip)

    def slot_at(self, i):
        """Of the ring, for the i-th block of all that the program takes."""
        return lax.rem(i, jnp.int32(self.program.stages))

    # S and dP at once.

    def summed(self):
        """(dv, dk), of both consumers where the program is a half."""
        start = [zeros((ROWS, self.c.hv)), zeros((ROWS, self.c.h))]
        program, barriers = self.program, self.barriers
        part = inside(program.blocks, program.blocks_of(self.share.part(self.me)))
        sums = self.walk_all(self.step, start, part)
        exchange = self.buffers.sums, barriers.written, barriers.read
        return self.share.summed(self.me, sums, *exchange)

    def slot_of(self, member, j):
        program = self.program
        number = member * program.count + j - program.first
        return self.slot_at(self.share.in_ring(self.me, number))

    def step(self, j, sums, masked, member):
        buffers, barriers = self.buffers, self.barriers
        slot = self.slot_of(member, j)
        plgpu.barrier_wait(barriers.full.at[slot])
        q, dout = buffers.q.at[slot], buffers.dout.at[slot]
        # Behind the products it would wait for each of these loads in turn.
        lse2 = plgpu.load(buffers.lse2.at[slot], layout=BY_COLUMN)
        delta = plgpu.load(buffers.delta.at[slot], layout=BY_COLUMN)

        held = opaque(jnp.int32(self.me))  # no descriptors that would be spilled
        s, dp = two_products(
            buffers.k.at[held],
            q.transpose((1, 0)),
            buffers.v.at[held],
            dout.transpose((1, 0)),
        )
        p, bent = self.weights_of(s, lse2, slot, j, masked, member)
        ds = slopes(p, dp, by_column(delta, dp.shape), bent)
        dtype = self.refs.q.dtype
        products = [(p.astype(dtype), dout), (ds.astype(dtype), q)]
        sums = accumulated(sums, products, self.interpret)
        self.share.release(barriers.free.at[slot])
        return sums

    def skip(self, j, _, member):
        slot = self.slot_of(member, j)
        plgpu.barrier_wait(self.barriers.full.at[slot])
        self.share.release(self.barriers.free.at[slot])

    # dP when P has been used, as registers have no room for both.

    def summed_in_turn(self):
        """(dv, dk)."""
        program = self.program
        start = [zeros((ROWS, self.c.hv)), zeros((ROWS, self.c.h))]
        none = zeros((ROWS, program.block_q)).astype(self.refs.q.dtype)
        dv, dk, ds = self.walk_all(self.step_in_turn, (*start, none))
        dv = dv * 2.0**-SHIFT

        def last_block(i, dk):
            slot = self.slot_at(i)
            q = self.buffers.q.at[slot]
            (dk,) = accumulated([dk], [(ds, q)], self.interpret)
            plgpu.barrier_arrive(self.barriers.free.at[slot])
            return dk

        visits = program.count * self.c.group
        last = lax.max(visits - 1, jnp.int32(0))
        return dv, lax.fori_loop(last, visits, last_block, dk)

    def step_in_turn(self, j, carry, masked, member):
        """The product for dk of the block before lies under the exponentials."""
        dv, dk, before = carry
        program, buffers, barriers = self.program, self.buffers, self.barriers
        interpret = self.interpret
        i = member * program.count + j - program.first
        slot = self.slot_at(i)
        slot_before = self.slot_at(lax.max(i - 1, jnp.int32(0)))
        q_before = buffers.q.at[slot_before]
        plgpu.barrier_wait(barriers.full.at[slot])
        q, dout = buffers.q.at[slot], buffers.dout.at[slot]
        held = opaque(self.me)

        def keys_and_weights(s_ref, dk_ref):
            set_sum(dk_ref, dk, interpret)
            plgpu.wgmma(s_ref, buffers.k.at[held], q.transpose((1, 0)))
            issue_sum(dk_ref, before, q_before, interpret)
            s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
            lse2 = plgpu.load(buffers.lse2.at[slot], layout=BY_COLUMN)
            p, bent = self.weights_of(s, lse2, slot, j, masked, member)
            if bent is None:
                p = curve = lax.optimization_barrier(p)
            else:
                p, curve = lax.optimization_barrier((p, p * (1.0 - bent * bent)))
            summed = finished_sum(dk_ref, dk, before, q_before, interpret)
            return summed, p.astype(self.refs.q.dtype), curve.astype(jnp.float16)

        square = sum_of((ROWS, program.block_q))
        dk, p, curve = pl.run_scoped(keys_and_weights, square, sum_of(dk.shape))

        @pl.when(i > 0)
        def release_before():
            plgpu.barrier_arrive(barriers.free.at[slot_before])

        (dv,) = accumulated([dv], [(p, dout)], interpret)
        dp = product(buffers.v.at[held], dout.transpose((1, 0)))
        delta = plgpu.load(buffers.delta.at[slot], layout=BY_COLUMN)
        return dv, dk, scaled_slopes(curve, dp, delta).astype(self.refs.q.dtype)
