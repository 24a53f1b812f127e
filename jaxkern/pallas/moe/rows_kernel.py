"""Rows times the weight of their group: y = x w[group]^T, and dx = dy w[group].

Of 8-bit floats the sums are those of the codes; what scales a row of x and a column of
y is read when they are done. Read before, it would hold up the first step.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.gpu.moe.row_tiles import GROUP, ROW, START, STOP
from jaxkern.pallas.attention.attention.pairs import BY_COLUMN, BY_ROW
from jaxkern.pallas.moe.consumer import (
    Barriers,
    Buffers,
    as_copied,
    as_multiplied,
    pass_over,
    store,
    store_some,
    sums,
)
from jaxkern.pallas.moe.problem import (
    ALIGN,
    BESIDE,
    CONSUMERS,
    ROWS,
    Problem,
    place,
    slot_of,
    tiles_of,
)


def at_first() -> tuple:
    """Blocks, and tiles of both kinds, that a program has had."""
    return jnp.int32(0), (jnp.int32(0), jnp.int32(0))


class Tiles:
    """The tiles that a program computes, `mine` of them.

    Whole tiles are dealt to the programs one by one, then those of half the height, so
    that all have nearly as many of either. A program takes both in the order of rows,
    as its neighbours do, which share blocks of weights in the cache.
    """

    def __init__(self, program: Any, tiles_ref: Any, count_ref: Any, c: Problem):
        self.tiles_ref, self.c, self.program = tiles_ref, c, program
        self.whole, self.halves = count_ref[0], count_ref[1]
        self.mine_whole = tiles_of(program, self.whole * c.columns, c)
        dealt = lax.rem(self.whole * c.columns, jnp.int32(c.programs))
        self.from_half = lax.rem(program - dealt + c.programs, jnp.int32(c.programs))
        self.mine_halves = tiles_of(self.from_half, self.halves * c.columns, c)
        self.mine = self.mine_whole + self.mine_halves

    def candidates(self, taken: tuple) -> tuple:
        """(row of the table, column) of the next of both, and whether a half is next.

        `taken`: how many of both a program has had.
        """
        c, (wholes, halves) = self.c, taken
        whole = self.program + wholes * c.programs
        row, column = place(whole, lax.max(self.whole, jnp.int32(1)), c.columns)
        half = self.from_half + halves * c.programs
        low, beside = place(half, lax.max(self.halves, jnp.int32(1)), c.columns)
        # what is not there is read all the same
        nothing, end = jnp.int32(0), lax.max(self.whole + self.halves, jnp.int32(1)) - 1
        row = lax.clamp(nothing, row, end)
        low = lax.clamp(nothing, self.whole + low, end)
        strip, other = (lax.div(x, jnp.int32(BESIDE)) for x in (column, beside))
        above = self.tiles_ref[low, ROW] < self.tiles_ref[row, ROW]
        first = (other < strip) | ((other == strip) & above)
        first = first | (wholes >= self.mine_whole)
        return (row, column), (low, beside), first & (halves < self.mine_halves)

    def following(self, taken: tuple) -> tuple:
        """(row of the table, column) of the next tile."""
        whole, half, takes_half = self.candidates(taken)
        return tuple(
            jnp.where(takes_half, b, a) for a, b in zip(whole, half, strict=True)
        )

    def with_one_more(self, taken: tuple) -> tuple:
        _, _, takes_half = self.candidates(taken)
        one = takes_half.astype(jnp.int32)
        return taken[0] + 1 - one, taken[1] + one


def scaled_rows_kernel(
    x_ref,
    w_ref,
    tiles_ref,
    count_ref,
    x_scale_ref,
    w_scale_ref,
    y_ref,
    held: Buffers,
    signals: Barriers,
    *,
    c: Problem,
):
    """y = x_scale w_scale (x w^T) of bytes of e4m3; see `scales` of the launch."""
    scales = x_scale_ref, w_scale_ref
    held = held._replace(a=tuple(held.a), b=tuple(held.b))
    refs = x_ref, w_ref, tiles_ref, count_ref, y_ref
    rows_kernel(*refs, held, signals, c=c, turned=True, scales=scales)


def scaled(total: Any, scales: tuple, row: Any, group: Any, column: Any) -> Any:
    """The sums of a tile times the scales of its rows and of its columns."""
    by_row, by_column = scales
    rows, columns = total.shape
    one = plgpu.load(by_row.at[pl.ds(row, rows)], layout=BY_ROW, optimized=False)
    other = by_column.at[group, pl.ds(column, columns)]
    other = plgpu.load(other, layout=BY_COLUMN, optimized=False)
    total = total * lax.broadcast_in_dim(one, total.shape, [0])
    return total * lax.broadcast_in_dim(other, total.shape, [1])


def rows_kernel(
    x_ref,
    w_ref,
    tiles_ref,
    count_ref,
    y_ref,
    held: Buffers,
    signals: Barriers,
    *,
    c: Problem,
    turned: bool,
    scales: tuple | None = None,
):
    """`turned`: w is `[e, n, k]`, else `[e, k, n]`.

    `scales`: of rows, zeros behind the last of them, and of columns by group, those of
    no group 0: so what has no group stays 0, whatever stands there.
    """
    me = lax.axis_index("warpgroup")
    program = lax.axis_index("program")
    tiles = Tiles(program, tiles_ref, count_ref, c)

    def tile(taken):
        row, column = tiles.following(taken)
        # behind the last group there is nothing to sum
        steps = jnp.where(tiles_ref[row, GROUP] < c.groups, c.steps, 0)
        first = pl.multiple_of(tiles_ref[row, ROW], ALIGN)
        return row, first, pl.multiple_of(column * c.block_n, c.block_n), steps

    def rows_of(row, first, part):
        """Which of the rows of a consumer are the group's: from, to, whether any."""
        first = first + part * ROWS
        start = lax.max(tiles_ref[row, START] - first, jnp.int32(0))
        stop = lax.min(tiles_ref[row, STOP] - first, jnp.int32(ROWS))
        return start, stop, stop > start

    @pl.when(me == CONSUMERS)
    def load():
        plgpu.set_max_registers(40, action="decrease")

        def load_tile(_, carry):
            at, taken = carry
            row, first, column, steps = tile(taken)
            group = lax.min(tiles_ref[row, GROUP], jnp.int32(c.groups - 1))

            def step(j, _):
                slot = slot_of(at + j, c)
                depth = pl.ds(pl.multiple_of(j * c.block_k, c.block_k), c.block_k)
                columns = pl.ds(column, c.block_n)
                plgpu.barrier_wait(signals.free.at[slot])
                full = signals.full.at[slot]
                w_at = (group, columns, depth) if turned else (group, depth, columns)
                b = as_copied(held.b).at[slot]
                plgpu.copy_gmem_to_smem(w_ref.at[w_at], b, full)
                for w in range(CONSUMERS):
                    rows = pl.ds(first + w * ROWS, ROWS)
                    a = as_copied(held.a).at[slot, w]
                    plgpu.copy_gmem_to_smem(x_ref.at[rows, depth], a, full)

            lax.fori_loop(0, steps, step, None)
            return at + steps, tiles.with_one_more(taken)

        lax.fori_loop(0, tiles.mine, load_tile, at_first())
        for slot in range(c.stages):
            plgpu.barrier_wait(signals.free.at[slot])

    @pl.when(me < CONSUMERS)
    def multiply():
        plgpu.set_max_registers(232, action="increase")
        for slot in range(c.stages):
            plgpu.barrier_arrive(signals.free.at[slot])

        def product(held, slot, me):
            b = as_multiplied(held.b).at[slot]
            b = b.transpose((1, 0)) if turned else b
            return as_multiplied(held.a).at[slot, me], b

        def await_block(_, slot):
            plgpu.barrier_wait(signals.full.at[slot])

        def multiply_tile(_, carry):
            at, taken = carry
            row, first, column, steps = tile(taken)
            start, stop, some = rows_of(row, first, me)
            first = first + me * ROWS

            @pl.when(some)
            def busy():
                total = sums(at, steps, me, held, signals, c, product, await_block)
                if scales is not None:
                    zeros = scales[0].shape[0] - ROWS
                    from_row = jnp.where(steps > 0, first, zeros)
                    group = tiles_ref[row, GROUP]
                    total = scaled(total, scales, from_row, group, column)
                whole, by_row = held.out

                @pl.when(stop - start == ROWS)
                def all_rows():
                    rows = pl.ds(pl.multiple_of(first, ALIGN), ROWS)
                    store(total, y_ref.at[rows], column, me, whole, c)

                @pl.when(stop - start < ROWS)
                def some_rows():
                    place = column, me, by_row, c, first, start, stop
                    store_some(total, y_ref, *place)

            @pl.when(jnp.logical_not(some))
            def idle():
                pass_over(at, steps, signals, c)

            return at + steps, tiles.with_one_more(taken)

        lax.fori_loop(0, tiles.mine, multiply_tile, at_first())
        plgpu.wait_smem_to_gmem(0)
