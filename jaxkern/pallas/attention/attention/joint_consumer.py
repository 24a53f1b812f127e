"""The warpgroups of the kernel of five products that compute: dk, dv and halves of dq.

Each has dk and dv of 64 keys. What all keys of the program add to dq they compute half
each, of the columns: dS of both consumers is in shared memory, a step old.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.attention.attention.blocks import position_and_length
from jaxkern.pallas.attention.attention.gradient_blocks import (
    BLOCK,
    CONSUMERS,
    KEYS,
    STAGES,
    by_column,
    dot,
    dscale,
    shown,
    slopes,
    store,
    sum_of,
    visible,
    walk_heads,
    weights,
    zeros,
)
from jaxkern.pallas.attention.attention.joint_stores import store_integers, store_slopes
from jaxkern.pallas.attention.attention.joint_tiles import SLOTS, Program
from jaxkern.pallas.attention.attention.pairs import BY_COLUMN, BY_ROW
from jaxkern.pallas.attention.attention.problem import ROWS
from jaxkern.pallas.attention.attention.rows import HALF
from jaxkern.pallas.attention.attention.wgmma import by_row, opaque


class Consumer:
    """The keys of a consumer, which begin at `row`, and `half` of the columns of dq."""

    def __init__(self, program: Program, me: Any):
        refs, barriers = program.refs, program.barriers
        self.program, self.me, self.refs, self.barriers = program, me, refs, barriers
        self.buffers, self.c, self.interpret = (
            program.buffers,
            program.c,
            program.interpret,
        )
        plgpu.set_max_registers(232, action="increase")
        for slot in range(STAGES):
            plgpu.barrier_arrive(barriers.free.at[slot])
        self.offset, self.length = position_and_length(
            program.batch, refs.lengths, refs.offset, self.c
        )
        self.row = (program.block * CONSUMERS + me) * ROWS
        self.kv_ids = None
        if refs.kv_ids is not None:
            ids = refs.kv_ids.at[program.batch, pl.ds(self.row, ROWS)]
            self.kv_ids = plgpu.load(ids, layout=BY_ROW, optimized=False)
        self.dtype = refs.q.dtype
        self.half, self.part = pl.ds(me * HALF, HALF), (BLOCK, HALF)
        # The first step computes dq of zeros, which nobody adds.
        none = zeros((ROWS, BLOCK)).astype(self.dtype)
        store_slopes(none, self.buffers.ds.at[SLOTS - 1, me], self.interpret)
        plgpu.barrier_arrive(barriers.ds_ready.at[SLOTS - 1])
        plgpu.barrier_wait(barriers.held)

    def differentiate(self) -> None:
        program, c = self.program, self.c
        counts = plgpu.layout_cast(jnp.zeros((BLOCK,), jnp.float32), BY_ROW)
        start = zeros((ROWS, c.hv)), zeros((ROWS, c.h)), counts
        at = program.blocks, self.refs.lengths, self.refs.bounds, c, KEYS
        dv, dk, counts = walk_heads(self.step, start, *at)
        self.last_queries(counts)
        self.store_keys(dk, dv)

    def step(self, j, carry, masked, member):
        """One block of queries of a head; `counts` are those of the step before."""
        dv, dk, counts = carry
        buffers, barriers = self.buffers, self.barriers
        i = member * self.program.count + j - self.program.first
        slot, ds_slot = lax.rem(i, jnp.int32(STAGES)), lax.rem(i, jnp.int32(SLOTS))
        before = lax.rem(i + SLOTS - 1, jnp.int32(SLOTS))
        q, dout = buffers.q.at[slot], buffers.dout.at[slot]
        plgpu.barrier_wait(barriers.full.at[slot])
        p, ds = self.weights_and_slopes(j, slot, before, masked)
        store_slopes(ds, buffers.ds.at[ds_slot, self.me], self.interpret)
        plgpu.barrier_arrive(barriers.ds_ready.at[ds_slot])
        sums = dv, dk, (p, dout), (ds, q)
        dv, dk = self.added(*sums, before, counts)
        counts = plgpu.load(buffers.counts.at[slot], layout=BY_ROW)
        plgpu.barrier_arrive(barriers.free.at[slot])
        return dv, dk, counts

    def weights_and_slopes(self, j, slot, before, masked):
        """(P, dS), rounded."""
        buffers = self.buffers
        q, dout = buffers.q.at[slot], buffers.dout.at[slot]

        def rounded(s_acc, dp_acc):
            mine = opaque(jnp.int32(self.me))
            plgpu.wgmma(s_acc, buffers.k.at[mine], q.transpose((1, 0)))
            plgpu.wgmma(dp_acc, buffers.v.at[mine], dout.transpose((1, 0)))
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
            lse2 = plgpu.load(buffers.lse2.at[slot], layout=BY_COLUMN)
            seen = self.seen(s.shape, j) if masked else None
            p, _ = weights(s, None, by_column(lse2, s.shape), seen, self.c)
            # The other has also read what is overwritten below. Here, as ptxas
            # moves no exponentials over this branch, behind the end of dP.
            plgpu.barrier_wait(self.barriers.ds_ready.at[before])
            dp = dp_acc[...]
            delta = plgpu.load(buffers.delta.at[slot], layout=BY_COLUMN)
            ds = slopes(p, dp, by_column(delta, s.shape), None)
            return p.astype(self.dtype), ds.astype(self.dtype)

        square = sum_of((ROWS, BLOCK))
        return pl.run_scoped(rounded, square, square)

    def seen(self, shape, j):
        ends = self.row, j * BLOCK, self.offset, self.length
        seen = visible(shape, 0, *ends, self.c, self.interpret)
        where = self.program.batch, self.program.kv_head, self.row, j * BLOCK
        return shown(seen, self.kv_ids, self.refs.q_ids, None, *where)

    def added(self, dv, dk, p_dout, ds_q, before, counts):
        """(dv, dk) and their products, which dq of the step `before` lies under."""
        (p, dout), (ds, q) = p_dout, ds_q

        def products(dv_acc, dk_acc, dq_acc):
            if not self.interpret:  # which has no accumulators that start from values
                dv_acc[...], dk_acc[...] = dv, dk
                # Zeros that are no constant: ptxas keeps an accumulator of
                # constants beside those of S and dP, has too few registers for
                # that, and serialises all products.
                nothing = jnp.minimum(jnp.abs(counts), 0.0)
                dq_acc[...] = by_row(nothing, dq_acc.shape)
            self.issue_dq(dq_acc, before)
            if not self.interpret:
                plgpu.wgmma(dv_acc, p, dout)
                plgpu.wgmma(dk_acc, ds, q)
            dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=2)
            self.store_dq(dq, counts)
            if self.interpret:
                return dv + dot(p, dout[...]), dk + dot(ds, q[...])
            return dv_acc[...], dk_acc[...]

        return pl.run_scoped(products, *map(sum_of, (dv.shape, dk.shape, self.part)))

    def issue_dq(self, acc, slot):
        for w in range(CONSUMERS):
            at = opaque(jnp.int32(w))
            ds = self.buffers.ds.at[slot, at].transpose((1, 0))
            plgpu.wgmma(acc, ds, self.buffers.k.at[at].at[:, self.half])

    def store_dq(self, dq, counts):
        me = self.me
        plgpu.barrier_wait(self.barriers.dq_free.at[me])
        numbers = dq * by_row(counts, dq.shape)
        store_integers(numbers, self.buffers.dq.at[me], self.interpret)
        plgpu.barrier_arrive(self.barriers.dq_full.at[me])

    def last_queries(self, counts):
        """dq of the last step."""
        slot = lax.rem(self.program.steps + SLOTS - 1, jnp.int32(SLOTS))
        plgpu.barrier_wait(self.barriers.ds_ready.at[slot])

        def rest(acc):
            self.issue_dq(acc, slot)
            return acc[...]

        self.store_dq(pl.run_scoped(rest, sum_of(self.part)), counts)

    def store_keys(self, dk, dv):
        barriers, me = self.barriers, self.me
        plgpu.barrier_arrive(barriers.keys_free)
        plgpu.barrier_wait(barriers.keys_free)  # which the other consumer reads too
        mine = self.program.batch, pl.ds(self.row, ROWS), self.program.kv_head
        store(dk * dscale(self.c), self.buffers.k.at[me], self.refs.dk.at[mine])
        store(dv, self.buffers.v.at[me], self.refs.dv.at[mine])
        plgpu.barrier_wait(barriers.dq_free.at[me])
        plgpu.wait_smem_to_gmem(0)
