"""The warpgroups of the queries kernel that compute: dq of 64 queries each, and dS.

S = q K^T and dP = dout V^T are [64, block_k], dq is [64, h], all in registers.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.attention.attention.blocks import position_and_length
from jaxkern.pallas.attention.attention.gradient_blocks import (
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
from jaxkern.pallas.attention.attention.pairs import BY_ROW, bias_tile, copied_bias
from jaxkern.pallas.attention.attention.problem import ROWS
from jaxkern.pallas.attention.attention.queries_tiles import (
    Barriers,
    Buffers,
    Program,
    slot_of,
)
from jaxkern.pallas.attention.attention.wgmma import (
    WGMMA,
    by_row,
    finished_sum,
    issue_sum,
    load_bytes,
    opaque,
    set_sum,
    with_tail,
)


def differentiate(
    program: Program, buffers: Buffers, barriers: Barriers, me: Any, interpret: bool
) -> None:
    """All tiles of a consumer."""
    plgpu.set_max_registers(240, action="increase")
    for ring in barriers.free:
        for slot in range(ring.shape[0]):
            plgpu.barrier_arrive(ring.at[slot])
    plgpu.barrier_arrive(barriers.q_free.at[me])

    def tile(i, at):
        t = Tile(i, at, program, buffers, barriers, me, interpret)
        t.clear_slopes()
        store_queries(t, t.differentiated())
        return at + t.last - t.first

    program.walk(tile)
    plgpu.wait_smem_to_gmem(0)


def store_queries(t: "Tile", dq: Any) -> None:
    """dq goes to memory behind what is computed next."""
    staged = t.buffers.q if t.buffers.dq is None else t.buffers.dq
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    store(dq * dscale(t.c), staged.at[t.me], t.refs.dq.at[t.batch, t.rows, t.head])
    if t.buffers.dq is None:
        plgpu.barrier_arrive(t.barriers.q_free.at[t.me])


class Tile:
    """The queries of a consumer in one tile, of which `at` blocks came before it."""

    def __init__(
        self,
        i: Any,
        at: Any,
        program: Program,
        buffers: Buffers,
        barriers: Barriers,
        me: Any,
        interpret: bool,
    ):
        self.at, self.me, self.interpret = at, me, interpret
        self.buffers, self.barriers = buffers, barriers
        self.refs, self.c = program.refs, program.c
        self.batch, self.head, block = program.place_of(i)
        self.blocks = program.blocks_of(self.batch, block)
        part = program.blocks_of(self.batch, block, me)
        self.part = inside(self.blocks, part)
        self.first, _, _, self.last = self.blocks
        self.offset, self.length = position_and_length(
            self.batch, self.refs.lengths, self.refs.offset, self.c
        )
        self.row = (block * CONSUMERS + me) * ROWS
        self.rows = pl.ds(self.row, ROWS)
        self.lse2, self.delta = (
            plgpu.load(
                x.at[self.batch, self.head, self.rows], layout=BY_ROW, optimized=False
            )
            for x in (self.refs.lse2, self.refs.delta)
        )
        self.tail = None
        if self.refs.tail is not None:
            tail = self.refs.tail.at[self.batch, self.rows, self.head]
            self.tail = load_bytes(tail, interpret)
        plgpu.barrier_wait(barriers.ready.at[me])
        self.q_ids = None
        if self.refs.q_ids is not None:
            ids = self.refs.q_ids.at[self.batch, self.rows]
            self.q_ids = plgpu.load(ids, layout=BY_ROW, optimized=False)

    def clear_slopes(self):
        """dS of blocks that no loop visits."""
        if self.refs.slopes is None:
            return
        nothing = zeros((ROWS, self.c.block_k))
        self.buffers.slopes.at[self.me][...] = nothing.astype(self.refs.slopes.dtype)
        plgpu.commit_smem()
        end = -(-self.c.s // self.c.block_k)
        lax.fori_loop(0, self.part[0], self.copy_slopes, None)
        lax.fori_loop(self.part[3], end, self.copy_slopes, None)

    def differentiated(self):
        """dq, before its scale."""
        c, refs = self.c, self.refs
        ragged = refs.lengths is not None or c.s % c.block_k != 0
        bounded = refs.bounds is not None
        begins, ends = c.window is not None or bounded, c.causal or ragged or bounded
        dq = zeros((ROWS, c.h))
        if c.h + c.hv > NARROW:
            return walk_part(
                self.step,
                self.skip,
                dq,
                self.blocks,
                self.part,
                begins=begins,
                ends=ends,
            )
        return self.walk_behind(dq, begins, ends)

    def slot_at(self, j):
        return slot_of(self.buffers.k, self.at + j - self.first), slot_of(
            self.buffers.v, self.at + j - self.first
        )

    def keys_and_values(self, j):
        """Of a block, when they are there."""
        k_slot, v_slot = self.slot_at(j)
        plgpu.barrier_wait(self.barriers.k_full.at[k_slot])
        if self.barriers.v_full is not None:
            plgpu.barrier_wait(self.barriers.v_full.at[v_slot])
        return self.buffers.k.at[k_slot], self.buffers.v.at[v_slot]

    def weights_of(self, s, j, masked):
        seen = bias = None
        key, v_slot = j * self.c.block_k, self.slot_at(j)[1]
        if self.buffers.bias is not None:
            bias = copied_bias(self.buffers.bias.at[v_slot, self.me])
        elif self.refs.bias is not None:
            bias = bias_tile(
                self.refs.bias, self.batch, self.head, self.row, key, s.shape
            )
        if self.barriers.v_free is not None:
            plgpu.barrier_arrive(self.barriers.v_free.at[v_slot])
        if masked:
            ends = self.row, self.offset, self.length
            seen = visible(s.shape, 1, key, *ends, self.c, self.interpret)
            where = self.batch, self.head, self.row, key
            ids = self.q_ids, self.refs.kv_ids
            seen = shown(seen, *ids, self.refs.words, *where)
        return weights(s, bias, by_row(self.lse2, s.shape), seen, self.c)

    def whole_delta(self):
        if self.buffers.out is None:
            return self.delta
        both = (
            plgpu.load(x.at[self.me], layout=WGMMA)
            for x in (self.buffers.dout, self.buffers.out)
        )
        dout, out = (x.astype(jnp.float32) for x in both)
        if self.tail is not None:
            out = with_tail(out, self.tail, self.refs.out.dtype)
        summed = self.delta + jnp.sum(dout * out, axis=1)
        self.refs.delta_out.at[self.batch, self.head, self.rows][...] = summed
        return summed

    def slopes_of(self, p, bent, dp, delta, j):
        """dS of S before the cap."""
        ds = p * (dp - by_row(delta, dp.shape))
        if self.refs.slopes is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.store_slopes(ds, j)
        if bent is not None:
            ds = ds * (1.0 - bent * bent)
        return ds.astype(self.refs.q.dtype)

    def slopes_at_once(self, j, masked):
        k, v = self.keys_and_values(j)
        held = opaque(self.me) if self.c.h + self.c.hv > NARROW else self.me
        s, dp = two_products(
            self.buffers.q.at[held],
            k.transpose((1, 0)),
            self.buffers.dout.at[held],
            v.transpose((1, 0)),
        )
        return self.slopes_of(*self.weights_of(s, j, masked), dp, self.delta, j)

    def add(self, j, dq, ds):
        k_slot, _ = self.slot_at(j)
        (dq,) = accumulated([dq], [(ds, self.buffers.k.at[k_slot])], self.interpret)
        plgpu.barrier_arrive(self.barriers.k_free.at[k_slot])
        return dq

    def step(self, j, dq, masked):
        return self.add(j, dq, self.slopes_at_once(j, masked))

    def hold(self):
        """ptxas moves no exponentials over a wait, behind the end of dP."""
        plgpu.barrier_arrive(self.barriers.pause.at[self.me])
        plgpu.barrier_wait(self.barriers.pause.at[self.me])

    def first_slopes(self, j, masked):
        """(dS, delta); delta is summed beside the products."""
        k, v = self.keys_and_values(j)

        def products(s_acc, dp_acc):
            plgpu.wgmma(s_acc, self.buffers.q.at[self.me], k.transpose((1, 0)))
            plgpu.wgmma(dp_acc, self.buffers.dout.at[self.me], v.transpose((1, 0)))
            delta = self.whole_delta()
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
            p, bent = self.weights_of(s, j, masked)
            self.hold()
            return p, bent, dp_acc[...], delta

        square = sum_of((ROWS, self.c.block_k))
        p, bent, dp, delta = pl.run_scoped(products, square, square)
        return self.slopes_of(p, bent, dp, delta, j), delta

    def step_behind(self, j, carry, masked):
        """The product for dq of the block before lies under the exponentials."""
        dq, before, delta = carry
        k_slot_before, _ = self.slot_at(j - 1)
        k_before = self.buffers.k.at[k_slot_before]
        k, v = self.keys_and_values(j)

        def products(s_acc, dp_acc, dq_acc):
            set_sum(dq_acc, dq, self.interpret)
            plgpu.wgmma(s_acc, self.buffers.q.at[self.me], k.transpose((1, 0)))
            issue_sum(dq_acc, before, k_before, self.interpret)
            plgpu.wgmma(dp_acc, self.buffers.dout.at[self.me], v.transpose((1, 0)))
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=2)
            p, bent = self.weights_of(s, j, masked)
            self.hold()
            dp = dp_acc[...]
            summed = finished_sum(dq_acc, dq, before, k_before, self.interpret)
            return summed, p, bent, dp

        square = sum_of((ROWS, self.c.block_k))
        dq, p, bent, dp = pl.run_scoped(products, square, square, sum_of(dq.shape))
        plgpu.barrier_arrive(self.barriers.k_free.at[k_slot_before])
        return dq, self.slopes_of(p, bent, dp, delta, j), delta

    def copy_slopes(self, j, _):
        keys = pl.ds(j * self.c.block_k, self.c.block_k)
        plgpu.copy_smem_to_gmem(
            self.buffers.slopes.at[self.me],
            self.refs.slopes.at[self.batch, self.head, self.rows, keys],
        )

    def store_slopes(self, ds, j):
        self.buffers.slopes.at[self.me][...] = ds.astype(self.refs.slopes.dtype)
        plgpu.commit_smem()
        self.copy_slopes(j, None)

    def skip(self, j, _):
        k_slot, v_slot = self.slot_at(j)
        self.keys_and_values(j)
        plgpu.barrier_arrive(self.barriers.k_free.at[k_slot])
        if self.barriers.v_free is not None:
            plgpu.barrier_arrive(self.barriers.v_free.at[v_slot])

    def walk_behind(self, dq, begins, ends):
        start, whole, whole_end, stop = self.part
        start = lax.min(start, self.last - 1)  # one at least
        stop = lax.max(stop, start + 1)
        lax.fori_loop(self.first, start, self.skip, None)
        others = in_order(start + 1, whole, whole_end, stop)
        carry = dq, *self.first_slopes(start, begins or ends)
        dq, ds, _ = walk(self.step_behind, carry, others, begins, ends)
        if self.buffers.dq is not None:
            plgpu.barrier_arrive(self.barriers.q_free.at[self.me])
        dq = self.add(stop - 1, dq, ds)
        lax.fori_loop(stop, self.last, self.skip, None)
        return dq
