"""The warpgroups that compute: scores, softmax and the sums of 64 queries each."""

import functools
import itertools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jaxlib.mlir.dialects import llvm

from jaxkern.pallas.attention.attention.forward_softmax import (
    Logits,
    any_grew,
    by_eighth,
    fading,
    powers,
    row_tops,
    scaled,
)
from jaxkern.pallas.attention.attention.forward_tiles import (
    Barriers,
    Buffers,
    Program,
    Tile,
    slot_of,
)
from jaxkern.pallas.attention.attention.pairs import BY_ROW, LOG2_E
from jaxkern.pallas.attention.attention.problem import ROWS, Problem
from jaxkern.pallas.attention.attention.wgmma import (
    WGMMA,
    by_row,
    finished_sum,
    issue_sum,
    opaque,
    set_sum,
    store_bytes,
    tail_of,
)

WARPGROUP = 128  # threads
FIRST_TURN = 8  # of 16 barriers, beyond those of Mosaic


def pass_turn(operation: str, consumer: Any) -> None:
    """A barrier of the hardware, of the one who gives a turn and the one who takes it.

    Nobody polls shared memory for it, and `arrive` does not wait. Mosaic itself uses
    the first barriers, one for each warpgroup and one for all.
    """

    def emit(_, barrier):
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [barrier.registers[()]],
            f"bar.{operation} $0, {2 * WARPGROUP};",
            "r",
            has_side_effects=True,
        )

    # what it decorates takes no context, which a type checker does not see
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    inline(emit)(jnp.asarray(FIRST_TURN + consumer, jnp.int32))


class Turns:
    """Consumers issue their products in turns."""

    def __init__(self, me: Any, turn: Any, c: Problem, interpret: bool):
        self.me, self.turn, self.c, self.interpret = me, turn, c, interpret
        self.following = lax.rem(me + 1, c.consumers)

    def give(self, consumer: Any) -> None:
        if not self.c.turns:
            return
        if self.interpret:  # which does not know the barriers of the hardware
            plgpu.barrier_arrive(self.turn.at[consumer])
        else:
            pass_turn("arrive", consumer)

    def wait(self, consumer: Any) -> None:
        if not self.c.turns:
            return
        if self.interpret:
            plgpu.barrier_wait(self.turn.at[consumer])
        else:
            pass_turn("sync", consumer)

    def begin(self) -> None:
        @pl.when(self.me == self.c.consumers - 1)
        def first():
            self.give(0)

    def end(self) -> None:
        @pl.when(self.me == 0)
        def last():
            self.wait(0)


def attend(
    program: Program, buffers: Buffers, barriers: Barriers, me: Any, interpret: bool
) -> None:
    c = program.c
    plgpu.set_max_registers(232 if c.consumers == 2 else 160, action="increase")
    plgpu.barrier_arrive(barriers.q_free.at[me])
    for slot in range(c.stages):
        plgpu.barrier_arrive(barriers.k_free.at[slot])
        plgpu.barrier_arrive(barriers.v_free.at[slot])
    turns = Turns(me, barriers.turn, c, interpret)
    if c.turns:
        turns.begin()

    def tile(i, at):
        t = program.tile(i)
        logits = Logits(t, me, program.refs, c, interpret)
        ring = Ring(at, buffers, barriers, me, c, interpret)
        acc, top, total = attend_tile(t, logits, ring, turns, interpret)
        acc, top, total = with_sink(acc, top, total, t, program.refs)
        store(acc, top, total, logits.row, t, program.refs, ring)
        return at + t.count

    lax.fori_loop(0, program.tiles(), tile, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)
    if c.turns:
        turns.end()


class Ring:
    """The blocks of keys and values of a tile, of which `at` came before it."""

    def __init__(
        self, at, buffers: Buffers, barriers: Barriers, me, c: Problem, interpret
    ):
        self.at, self.buffers, self.barriers = at, buffers, barriers
        self.me, self.c, self.interpret = me, c, interpret

    def slot(self, j):
        return slot_of(self.at + j, self.c)

    def issue_scores(self, s_ref, slot):
        for i in range(self.c.pieces):
            who = self.me if self.c.pieces == 1 else opaque(self.me)
            held = self.buffers.q.at[who, i]
            plgpu.wgmma(s_ref, held, self.buffers.k.at[slot, i].transpose((1, 0)))

    def release_keys(self, slot):
        """When their products are there; with a bias beside them, when it is read."""
        if self.buffers.bias is None:
            plgpu.barrier_arrive(self.barriers.k_free.at[slot])

    def bias(self, slot):
        """That of a block, and the barrier to be told when it is read."""
        if self.buffers.bias is None:
            return None, None
        return self.buffers.bias.at[slot, self.me], self.barriers.k_free.at[slot]


def attend_tile(t: Tile, logits: Logits, ring: Ring, turns: Turns, interpret: bool):
    """(sums, what they are relative to, row totals) over all blocks of a tile."""
    c, me, buffers, barriers = ring.c, ring.me, ring.buffers, ring.barriers
    scores = plgpu.WGMMAAccumulatorRef((ROWS, c.block_k), jnp.float32)
    sums = plgpu.WGMMAAccumulatorRef((ROWS, c.hv), jnp.float32)
    dtype = buffers.q.dtype
    edges = sorted({0, c.early, c.block_k - c.late, c.block_k})

    def in_parts(x):
        return [x[:, start:stop] for start, stop in itertools.pairwise(edges)]

    plgpu.barrier_wait(barriers.q_full.at[me])
    slot = ring.slot(0)
    plgpu.barrier_wait(barriers.k_full.at[slot])

    def first_scores(s_ref):
        ring.issue_scores(s_ref, slot)
        return s_ref[...]

    s = pl.run_scoped(first_scores, scores)
    ring.release_keys(slot)
    nothing = jnp.zeros((ROWS,), jnp.float32)
    nothing = plgpu.layout_cast(nothing, BY_ROW)
    acc = jnp.zeros((ROWS, c.hv), jnp.float32)
    acc = plgpu.layout_cast(acc, WGMMA)
    masked = logits.ends or logits.begins
    infinite, factor = logits.infinite(masked), logits.factor
    s = logits(s, 0, masked, *ring.bias(slot))
    top = row_tops(s, nothing - jnp.inf, factor)
    weights = powers(s, top, factor, infinite)
    total = by_eighth(weights)
    weights = weights.astype(dtype)
    plgpu.barrier_wait(barriers.v_full.at[slot])

    def step(j, carry, masked):
        acc, top, total, weights = carry
        slot, before = ring.slot(j), ring.slot(j - 1)
        infinite = logits.infinite(masked)
        lazy = c.lazy and not infinite

        plgpu.barrier_wait(barriers.k_full.at[slot])
        turns.wait(me)

        def scoped(s_ref, acc_ref):
            set_sum(acc_ref, acc, interpret)
            ring.issue_scores(s_ref, slot)
            issue_sum(acc_ref, weights, buffers.v.at[before], interpret)
            turns.give(turns.following)
            s = plgpu.wgmma_accumulator_load(s_ref, wait_n=int(c.overlap))
            ring.release_keys(slot)
            s = logits(s, j, masked, *ring.bias(slot))
            first, *rest = in_parts(s)
            late = [rest.pop()] if c.late else []
            higher = row_tops(s, top, factor)
            if lazy:
                guess = powers(first, top, factor, infinite)
                grew = any_grew(top, higher, interpret)
                base, guess = lax.cond(
                    grew,
                    lambda: (higher, powers(first, higher, factor, infinite)),
                    lambda: (top, guess),
                )
            else:
                base, guess = higher, powers(first, higher, factor, infinite)
            early = [guess, *(powers(x, base, factor, infinite) for x in rest)]
            # What waits for a barrier is not moved, so it keeps the compiler from
            # moving the softmax behind the end of the product.
            base, early = lax.optimization_barrier((base, early))
            plgpu.barrier_wait(barriers.v_full.at[slot])
            summed = finished_sum(
                acc_ref, acc, weights, buffers.v.at[before], interpret
            )
            plgpu.barrier_arrive(barriers.v_free.at[before])

            def faded():
                fade = fading(top, base, infinite)
                return scaled(summed, fade), scaled(total, fade)

            if lazy:
                summed, more = lax.cond(grew, faded, lambda: (summed, total))
            else:
                summed, more = faded()
            new = early + [powers(x, base, factor, infinite) for x in late]
            more = more + functools.reduce(lax.add, map(by_eighth, new))
            # not before: the product in flight reads registers of the old ones
            new = [w.astype(dtype) for w in new]
            return summed, base, more, jnp.concatenate(new, axis=1)

        return pl.run_scoped(scoped, scores, sums)

    def walk(start, stop, carry, masked):
        return lax.fori_loop(start, stop, functools.partial(step, masked=masked), carry)

    carry = acc, top, total, weights
    right = jnp.int32(1)
    if logits.ends:
        right = lax.max(right, lax.min(t.last - t.whole_end, t.count))
        carry = walk(1, right, carry, masked=True)
    left = t.count
    if logits.begins:
        left = lax.max(right, lax.min(t.last - t.whole, t.count))
    carry = walk(right, left, carry, masked=False)
    if logits.begins:
        carry = walk(left, t.count, carry, masked=True)
    acc, top, total, weights = carry
    total = jnp.sum(total, axis=1)
    before = ring.slot(t.count - 1)
    if not c.out_in_query:
        plgpu.barrier_arrive(barriers.q_free.at[me])

    def last_sum(acc_ref):
        set_sum(acc_ref, acc, interpret)
        issue_sum(acc_ref, weights, buffers.v.at[before], interpret)
        return finished_sum(acc_ref, acc, weights, buffers.v.at[before], interpret)

    acc = pl.run_scoped(last_sum, sums)
    plgpu.barrier_arrive(barriers.v_free.at[before])
    return acc, top, total


def with_sink(acc, top, total, t: Tile, refs):
    if refs.sinks is None:
        return acc, top, total
    sink = refs.sinks[t.head].astype(jnp.float32) * LOG2_E
    higher = jnp.maximum(top, sink)
    base = jnp.where(higher == -jnp.inf, 0.0, higher)
    fade = jnp.exp2(top - base)
    total = total * fade + jnp.exp2(sink - base)
    return acc * by_row(fade, acc.shape), higher, total


def store(acc, top, total, row, t: Tile, refs, ring: Ring) -> None:
    """Results go to memory behind what is computed next."""
    c, me, buffers = ring.c, ring.me, ring.buffers
    seen = total != 0
    total = jnp.where(seen, total, 1.0)
    share = 1.0 / total
    staged = buffers.q.at[me, 0] if c.out_in_query else buffers.out.at[me]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    out = acc * by_row(share, acc.shape)
    rounded = out.astype(buffers.q.dtype)
    staged[...] = rounded
    lse = top * math.log(2) + jnp.log(total)
    lse = jnp.where(seen, lse, -jnp.inf)
    lse_at = refs.lse.at[t.batch, t.head, pl.ds(row, ROWS)]
    (lse_at if buffers.lse is None else buffers.lse.at[me])[...] = lse
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(
        staged, refs.out.at[(t.batch, pl.ds(row, ROWS), t.head, *t.columns)]
    )
    if buffers.lse is not None:
        plgpu.copy_smem_to_gmem(buffers.lse.at[me], lse_at)
    if refs.tail is not None:
        tail_at = refs.tail.at[t.batch, pl.ds(row, ROWS), t.head]
        store_bytes(tail_of(out, rounded), tail_at, ring.interpret)
    if c.out_in_query:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(ring.barriers.q_free.at[me])
