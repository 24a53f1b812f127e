"""The decode kernel on Hopper: a warpgroup that loads, and one that computes.

Keys are the rows of the first product and dims those of the second one, so that the
queries of a key head fill eight columns and not 64 rows.
"""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.attention.attention.wgmma import WGMMA
from jaxkern.pallas.attention.decode.decode_walk import PAIR, Part, Problem, Walk, int32
from jaxkern.pallas.rows.clusters import join, ordered, store

PIECES = 4  # of a block, of which those are loaded that are seen
COLUMNS = 8  # queries: the fewest that WGMMA takes
ROWS = 64  # likewise
BY_COLUMN = WGMMA.reduce(0)
LEAST = -3e38  # below every logit, and finite


class Operands(NamedTuple):
    """Arrays in memory; those that are absent are None."""

    q: Any
    k: Any
    v: Any
    lengths: Any
    offset: Any
    out: Any
    lse: Any
    parts: Any  # what the programs of a cluster tell each other
    part_lse: Any


class Buffers(NamedTuple):
    """Shared memory."""

    q: Any
    k: Any
    v: Any
    weights: Any
    out: Any
    order: Any  # of the sequences, for each warpgroup


class Barriers(NamedTuple):
    q_full: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any
    met: Any  # the programs of a cluster


def by_column(x, shape):
    return lax.broadcast_in_dim(x, shape, [1])


def zeros(shape, layout: Any = WGMMA):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


class Program:
    def __init__(
        self, refs: Operands, buffers: Buffers, barriers: Barriers, c: Problem
    ):
        self.refs, self.buffers, self.barriers, self.c = refs, buffers, barriers, c
        bounded = refs.lengths is not None or refs.offset is not None
        self.ragged = bounded or c.s % c.block != 0

    def new_walk(self) -> Walk:
        order = self.buffers.order
        order = None if order is None else order.at[lax.axis_index("warpgroup")]
        return Walk(self.c, self.refs.lengths, self.refs.offset, order)

    def slot(self, at):
        return lax.rem(at, int32(self.c.stages))

    def load_block(self, batch, head, j, at, end=None):
        """Block j of a head, up to key `end`, is the program's block number `at`."""
        c, slot, barriers = self.c, self.slot(at), self.barriers

        def copy(ref, buffer, full, free):
            pl.when(at >= c.stages)(lambda: plgpu.barrier_wait(free.at[slot]))

            def rows(count):
                source = ref.at[batch, pl.ds(j * c.block, count), head]
                target = buffer.at[slot, pl.ds(0, count)]
                plgpu.copy_gmem_to_smem(source, target, full.at[slot])

            if end is None:
                rows(c.block)
                return
            piece = c.block // PIECES
            pieces = lax.div(end - j * c.block + (piece - 1), int32(piece))
            for n in range(1, PIECES + 1):
                least, most = 0 if n == 1 else n, n if n < PIECES else c.s
                fits = (pieces >= least) & (pieces <= most)
                pl.when(fits)(functools.partial(rows, n * piece))

        copy(self.refs.k, self.buffers.k, barriers.k_full, barriers.k_free)
        copy(self.refs.v, self.buffers.v, barriers.v_full, barriers.v_free)
        return at + 1

    def load(self) -> None:
        c, k = self.c, int32(self.c.k)
        at = int32(0)
        if c.ahead:
            # what it is likely to begin with, before the lengths are there
            first = lax.axis_index("cluster") * c.cluster + lax.axis_index("rank")
            at = self.load_block(lax.div(first, k), lax.rem(first, k), int32(0), at)
        walk = self.new_walk()

        def head(i, at):
            part = walk.part(i)
            there = jnp.where(walk.begun & (i == 0), 1, 0) if c.ahead else 0

            def block(j, at):
                head = lax.rem(part.head, k)
                end = part.end if self.ragged else None
                return self.load_block(part.batch, head, j, at, end)

            return lax.fori_loop(part.start + there, part.stop, block, at)

        total = lax.fori_loop(0, walk.count, head, at)

        def end(at, _):
            plgpu.barrier_wait(self.barriers.k_free.at[self.slot(at)])
            plgpu.barrier_wait(self.barriers.v_free.at[self.slot(at)])

        lax.fori_loop(lax.max(total - c.stages, int32(0)), total, end, None)

    def drop_block(self) -> None:
        b = self.barriers
        for full, free in ((b.k_full, b.k_free), (b.v_full, b.v_free)):
            plgpu.barrier_wait(full.at[0])
            plgpu.barrier_arrive(free.at[0])

    def fetch_queries(self, i) -> None:
        """The eight rows in which those of a head are."""
        first = lax.div(self.walk.part(i).head * self.c.group, int32(COLUMNS)) * COLUMNS
        rows, slot = self.refs.q.at[pl.ds(first, COLUMNS)], lax.rem(i, int32(2))
        full = self.barriers.q_full.at[slot]
        plgpu.copy_gmem_to_smem(rows, self.buffers.q.at[slot], full)

    def attend(self, interpret: bool) -> None:
        walk = self.walk = self.new_walk()
        at = int32(0)
        if self.c.ahead:
            pl.when(jnp.logical_not(walk.begun))(self.drop_block)
            at = jnp.where(walk.begun, 0, 1)

        @pl.when(walk.count > 0)
        def _():
            self.fetch_queries(int32(0))

        def head(i, at):
            part, slot = walk.part(i), lax.rem(i, int32(2))

            @pl.when(i + 1 < walk.count)
            def _():
                self.fetch_queries(i + 1)

            plgpu.barrier_wait(self.barriers.q_full.at[slot])
            queries = self.buffers.q.at[slot]
            out, lse = self.sums(part, queries, at, interpret)

            if self.c.cluster > 1:
                out, lse = lax.cond(
                    walk.together,
                    lambda: self.merged(i, out, lse, interpret),
                    lambda: (out, lse),
                )
            first = jnp.logical_or(jnp.logical_not(walk.together), walk.rank == 0)

            @pl.when(first)
            def _():
                self.store(part, out, lse)

            return at + part.stop - part.start

        lax.fori_loop(0, walk.count, head, at)
        plgpu.wait_smem_to_gmem(0)

    def sums(self, part: Part, queries, at, interpret: bool):
        """(out transposed, base-2 log-sum-exp) over a part of a head's keys."""
        c, buffers, barriers = self.c, self.buffers, self.barriers
        shape = c.block, COLUMNS
        scores = plgpu.WGMMAAccumulatorRef(shape, jnp.float32)
        sums = plgpu.WGMMAAccumulatorRef((c.h, COLUMNS), jnp.float32)
        weights = buffers.weights.transpose((1, 0))

        def step(j, carry, masked=False):
            acc, top, total = carry
            slot = self.slot(at + j - part.start)
            left = part.end - j * c.block
            plgpu.barrier_wait(barriers.k_full.at[slot])

            def first(ref):
                plgpu.wgmma(ref, buffers.k.at[slot], queries.transpose((1, 0)))
                return ref[...]

            z = pl.run_scoped(first, scores) * c.scale
            plgpu.barrier_arrive(barriers.k_free.at[slot])
            if masked:
                row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)
                z = jnp.where(row < left, z, -jnp.inf)
            higher = lax.max(top, jnp.max(z, axis=0))
            p = jnp.exp2(z - by_column(higher, shape))
            fade = jnp.exp2(top - higher)
            total = total * by_column(fade, shape) + p
            acc = acc * by_column(fade, acc.shape)
            # its maximum was a barrier: no product reads the weights any more
            weights[...] = plgpu.layout_cast(p.astype(buffers.weights.dtype), WGMMA)
            plgpu.barrier_wait(barriers.v_full.at[slot])
            if masked:
                self.clear(slot, left)
            plgpu.commit_smem()

            def second(rows, acc):
                of_rows = pl.ds(0, rows)

                def product(ref):
                    if not interpret:
                        ref[...] = acc
                    values = buffers.v.at[slot, of_rows].transpose((1, 0))
                    some = buffers.weights.at[:, of_rows].transpose((1, 0))
                    plgpu.wgmma(ref, values, some)
                    return acc + ref[...] if interpret else ref[...]

                return pl.run_scoped(product, sums)

            # keys of which none is seen may never have been loaded
            acc = self.for_rows(left, second, acc) if masked else second(c.block, acc)
            plgpu.barrier_arrive(barriers.v_free.at[slot])
            return acc, higher, total

        carry = (
            zeros((c.h, COLUMNS)),
            zeros((COLUMNS,), BY_COLUMN) + LEAST,
            zeros(shape),
        )
        whole = lax.min(lax.div(part.end, int32(c.block)), part.stop)
        whole = lax.max(whole, part.start)
        carry = lax.fori_loop(part.start, whole, step, carry)
        if self.ragged:
            masked = functools.partial(step, masked=True)
            carry = lax.fori_loop(whole, part.stop, masked, carry)
        acc, top, total = carry
        total = jnp.sum(total, axis=0)
        seen = total != 0
        total = jnp.where(seen, total, 1.0)
        lse = jnp.where(seen, top + jnp.log2(total), -jnp.inf)
        return acc * by_column(1.0 / total, acc.shape), lse

    def for_rows(self, left, f, x):
        """f(rows, x) with as many rows, in tiles of ROWS, as have the `left` first."""
        rows = self.c.block

        def of_fewer(rows, x):
            if rows == ROWS:
                return f(rows, x)
            fewer = functools.partial(of_fewer, rows - ROWS)
            return lax.cond(left <= rows - ROWS, fewer, functools.partial(f, rows), x)

        return of_fewer(rows, x)

    def clear(self, slot, left) -> None:
        """Zeros for values behind the `left` first ones of a tile: 0 * NaN is NaN."""
        for first in range(0, self.c.block, ROWS):

            def clear_tile(first=first):
                tile = self.buffers.v.at[slot, pl.ds(first, ROWS)]
                x = plgpu.load(tile, layout=WGMMA, optimized=False)
                row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=WGMMA)
                tile[...] = jnp.where(row < left - first, x, jnp.zeros_like(x))

            begun = (left > first) | (first == 0)
            pl.when(begun & (left < first + ROWS))(clear_tile)

    def merged(self, i, out, lse, interpret: bool):
        """With the other half of the head's keys."""
        walk = self.walk
        at = walk.cluster, lax.rem(i, int32(2))
        store(self.refs.parts.at[*at, walk.rank], out)
        store(self.refs.part_lse.at[*at, walk.rank], lse)
        ordered(interpret)
        join(interpret)
        plgpu.barrier_arrive(self.barriers.met)
        plgpu.barrier_wait(self.barriers.met)
        ordered(interpret)
        other = (*at, PAIR - 1 - walk.rank)
        theirs = plgpu.load(self.refs.parts.at[other], layout=WGMMA, optimized=False)
        their_lse = plgpu.load(
            self.refs.part_lse.at[other], layout=BY_COLUMN, optimized=False
        )
        top = lax.max(lse, their_lse)
        base = jnp.where(top == -jnp.inf, 0.0, top)
        own, their = jnp.exp2(lse - base), jnp.exp2(their_lse - base)
        total = own + their
        total = jnp.where(total == 0, 1.0, total)
        out = out * by_column(own / total, out.shape)
        out = out + theirs * by_column(their / total, out.shape)
        return out, top + jnp.log2(total)

    def store(self, part: Part, out, lse) -> None:
        c, staged = self.c, self.buffers.out
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out = plgpu.layout_cast(out.astype(staged.dtype), WGMMA)
        store(staged.transpose((1, 0)), out)
        store(self.refs.lse.at[part.head], lse * math.log(2))
        plgpu.commit_smem()
        first = lax.rem(part.head * c.group, int32(COLUMNS))
        rows = staged.at[pl.ds(first, c.group)]
        plgpu.copy_smem_to_gmem(rows, self.refs.out.at[part.head])


def decode_kernel(*refs: Any, c: Problem, interpret: bool) -> None:
    *operands, buffers, barriers = refs
    program = Program(Operands(*operands), buffers, barriers, c)
    me = lax.axis_index("warpgroup")
    pl.when(me == 1)(program.load)
    pl.when(me == 0)(functools.partial(program.attend, interpret))
