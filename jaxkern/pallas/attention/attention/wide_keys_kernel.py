"""keys_kernel for head dims whose sums are too wide for one consumer.

One consumer computes P and dv, the other dP, dS and dk of the same 64 keys. P goes from
one to the other, in float32 where there is room and operands are float16, else in
float16, times 2^SHIFT so that this holds it to 11 bits however small it is. `lse2` is
less by SHIFT for that. No product is computed twice.
"""

from typing import Any, NamedTuple

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
from jaxkern.pallas.attention.attention.keys_tiles import Operands
from jaxkern.pallas.attention.attention.pairs import (
    BY_COLUMN,
    BY_ROW,
    bias_tile,
    copied_bias,
    own,
)
from jaxkern.pallas.attention.attention.problem import ROWS, Problem
from jaxkern.pallas.attention.attention.wgmma import WGMMA


class Buffers(NamedTuple):
    """Shared memory; a bias that has no room in it is None."""

    k: Any
    v: Any
    q: Any
    dout: Any
    lse2: Any
    delta: Any
    p: Any
    bias: Any


class Barriers(NamedTuple):
    ready: Any  # keys, and values
    q_full: Any
    q_free: Any
    dout_full: Any
    dout_free: Any
    p_full: Any
    p_free: Any
    read: Any  # the values, for the last time


class Program:
    """ROWS keys of a key head, which begin at `row`, and the queries that see them."""

    def __init__(self, index: Any, operands: tuple, c: Problem, interpret: bool):
        *arrays, in_shared, barriers = operands
        self.refs, self.buffers = Operands(*arrays), Buffers(*in_shared)
        self.barriers, self.c, self.interpret = Barriers(*barriers), c, interpret
        refs = self.refs
        self.stages, self.block_q, _ = self.buffers.q.shape
        self.batch, self.kv_head, block = place_keys(index, c, ROWS)
        at = self.batch, block, refs.lengths, refs.offset, refs.bounds
        self.blocks = query_blocks(*at, c, ROWS, self.block_q)
        self.first, _, _, last = self.blocks
        self.count = last - self.first
        self.row = block * ROWS
        self.keys = pl.ds(self.row, ROWS)

    def slot_of(self, ring, j, member):
        number = member * self.count + j - self.first
        return lax.rem(number, jnp.int32(ring.shape[0]))

    def walk_all(self, step, carry):
        at = self.blocks, self.refs.lengths, self.refs.bounds, self.c, ROWS
        return walk_heads(step, carry, *at)

    def begin(self, me):
        """What both consumers do before they walk."""
        barriers = self.barriers
        plgpu.set_max_registers(240, action="increase")
        for slot in range(self.stages):
            plgpu.barrier_arrive(barriers.q_free.at[slot])
            plgpu.barrier_arrive(barriers.dout_free.at[slot])
        plgpu.barrier_wait(barriers.ready.at[me])

    def finish(self, x, staged, target):
        store(x, staged, target.at[self.batch, self.keys, self.kv_head])
        plgpu.wait_smem_to_gmem(0)


def wide_keys_kernel(*operands: Any, c: Problem, interpret: bool):
    """dk and dv of ROWS keys.

    `operands` are those of `Operands`, then buffers and barriers.
    """
    me = lax.axis_index("warpgroup")
    program = Program(lax.axis_index("program"), operands, c, interpret)

    @pl.when(me == CONSUMERS)
    def loads():
        load(program)

    @pl.when(me == 0)
    def weighs():
        weigh(program, me)

    @pl.when(me == 1)
    def differentiates():
        differentiate(program, me)


def load(program: Program) -> None:
    """Keys and values once, then by blocks what is of q, and what is of dout."""
    refs, buffers, barriers = program.refs, program.buffers, program.barriers
    batch, kv_head, keys, count = (
        program.batch,
        program.kv_head,
        program.keys,
        program.count,
    )
    plgpu.set_max_registers(24, action="decrease")
    for n, (source, target) in enumerate(((refs.k, buffers.k), (refs.v, buffers.v))):
        source = source.at[batch, keys, kv_head]
        plgpu.copy_gmem_to_smem(source, target, barriers.ready.at[n])

    def step(j, _):
        head = kv_head * program.c.group + lax.div(j, count)
        slot = lax.rem(j, jnp.int32(program.stages))
        first = (program.first + lax.rem(j, count)) * program.block_q
        rows = pl.ds(first, program.block_q)
        plgpu.barrier_wait(barriers.q_free.at[slot])
        of_q = [
            (refs.q.at[batch, rows, head], buffers.q),
            (refs.lse2.at[batch, head, rows], buffers.lse2),
        ]
        if buffers.bias is not None:
            at = own(refs.bias, batch, head)
            of_q.append((refs.bias.at[*at, rows, keys], buffers.bias))
        for source, target in of_q:
            plgpu.copy_gmem_to_smem(source, target.at[slot], barriers.q_full.at[slot])
        plgpu.barrier_wait(barriers.dout_free.at[slot])
        for source, target in (
            (refs.dout.at[batch, rows, head], buffers.dout),
            (refs.delta.at[batch, head, rows], buffers.delta),
        ):
            full = barriers.dout_full.at[slot]
            plgpu.copy_gmem_to_smem(source, target.at[slot], full)

    lax.fori_loop(0, count * program.c.group, step, None)
    for slot in range(program.stages):
        plgpu.barrier_wait(barriers.q_free.at[slot])
        plgpu.barrier_wait(barriers.dout_free.at[slot])


def weigh(program: Program, me: Any) -> None:
    """The first consumer: P, which the other waits for, and dv."""
    refs, buffers, barriers = program.refs, program.buffers, program.barriers
    c, batch, row = program.c, program.batch, program.row
    interpret = program.interpret
    program.begin(me)
    offset, length = position_and_length(batch, refs.lengths, refs.offset, c)
    kv_ids = None
    if refs.kv_ids is not None:
        ids = refs.kv_ids.at[batch, program.keys]
        kv_ids = plgpu.load(ids, layout=BY_ROW, optimized=False)

    def weights_of(s, lse2, slot, j, masked, member):
        seen = bias = None
        query, n = j * program.block_q, program.kv_head * c.group + member
        if buffers.bias is not None:
            bias = copied_bias(buffers.bias.at[slot], turned=True)
        elif refs.bias is not None:
            bias = bias_tile(refs.bias, batch, n, row, query, s.shape)
        plgpu.barrier_arrive(barriers.q_free.at[slot])
        if masked:
            seen = visible(s.shape, 0, row, query, offset, length, c, interpret)
            seen = shown(seen, kv_ids, refs.q_ids, refs.words, batch, n, row, query)
        return weights(s, bias, by_column(lse2, s.shape), seen, c)

    def step(j, dv, masked, member):
        slot = program.slot_of(buffers.q, j, member)
        p_slot = program.slot_of(buffers.p, j, member)
        plgpu.barrier_wait(barriers.q_full.at[slot])
        s = product(buffers.k, buffers.q.at[slot].transpose((1, 0)))
        lse2 = plgpu.load(buffers.lse2.at[slot], layout=BY_COLUMN)
        p, bent = weights_of(s, lse2, slot, j, masked, member)
        slope = p if bent is None else p * (1.0 - bent * bent)
        plgpu.barrier_wait(barriers.p_free.at[p_slot])
        buffers.p.at[p_slot][...] = slope.astype(buffers.p.dtype)
        plgpu.barrier_arrive(barriers.p_full.at[p_slot])
        plgpu.barrier_wait(barriers.dout_full.at[slot])
        products = [(p.astype(refs.q.dtype), buffers.dout.at[slot])]
        (dv,) = accumulated([dv], products, interpret)
        plgpu.barrier_arrive(barriers.dout_free.at[slot])
        return dv

    dv = program.walk_all(step, zeros((ROWS, c.hv)))
    for slot in range(buffers.p.shape[0]):
        plgpu.barrier_wait(barriers.p_free.at[slot])
    plgpu.barrier_wait(barriers.read)  # before dv lies where the values lay
    program.finish(dv * 2.0**-SHIFT, buffers.v, refs.dv)


def differentiate(program: Program, me: Any) -> None:
    """The second consumer: dP, dS and dk."""
    refs, buffers, barriers = program.refs, program.buffers, program.barriers
    program.begin(me)
    for slot in range(buffers.p.shape[0]):
        plgpu.barrier_arrive(barriers.p_free.at[slot])

    def step(j, dk, masked, member):
        del masked
        slot = program.slot_of(buffers.q, j, member)
        p_slot = program.slot_of(buffers.p, j, member)
        plgpu.barrier_wait(barriers.dout_full.at[slot])
        dp = product(buffers.v, buffers.dout.at[slot].transpose((1, 0)))
        delta = plgpu.load(buffers.delta.at[slot], layout=BY_COLUMN)
        plgpu.barrier_arrive(barriers.dout_free.at[slot])
        plgpu.barrier_wait(barriers.p_full.at[p_slot])
        p = plgpu.load(buffers.p.at[p_slot], layout=WGMMA)
        plgpu.barrier_arrive(barriers.p_free.at[p_slot])
        ds = scaled_slopes(p, dp, delta)
        plgpu.barrier_wait(barriers.q_full.at[slot])
        products = [(ds.astype(refs.q.dtype), buffers.q.at[slot])]
        (dk,) = accumulated([dk], products, program.interpret)
        plgpu.barrier_arrive(barriers.q_free.at[slot])
        return dk

    dk = program.walk_all(step, zeros((ROWS, program.c.h)))
    plgpu.barrier_arrive(barriers.read)
    program.finish(dk * dscale(program.c), buffers.k, refs.dk)
