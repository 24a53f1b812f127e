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
    CONSUMERS,
    ROWS,
    Problem,
    place,
    slot_of,
    tiles_of,
)


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
    row_tiles = count_ref[0]
    mine = tiles_of(program, row_tiles * c.columns, c)

    def tile(i):
        row, column = place(program + i * c.programs, row_tiles, c.columns)
        # behind the last group there is nothing to sum
        steps = jnp.where(tiles_ref[row, GROUP] < c.groups, c.steps, 0)
        first = pl.multiple_of(tiles_ref[row, ROW], ALIGN)
        return row, first, pl.multiple_of(column * c.block_n, c.block_n), steps

    @pl.when(me == CONSUMERS)
    def load():
        plgpu.set_max_registers(40, action="decrease")

        def load_tile(i, at):
            row, first, column, steps = tile(i)
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
            return at + steps

        lax.fori_loop(0, mine, load_tile, jnp.int32(0))
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

        def multiply_tile(i, at):
            row, first, column, steps = tile(i)
            first = first + me * ROWS
            start = lax.max(tiles_ref[row, START] - first, jnp.int32(0))
            stop = lax.min(tiles_ref[row, STOP] - first, jnp.int32(ROWS))

            @pl.when(stop > start)
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

            @pl.when(stop <= start)
            def idle():
                pass_over(at, steps, signals, c)

            return at + steps

        lax.fori_loop(0, mine, multiply_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
