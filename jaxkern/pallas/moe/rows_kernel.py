"""Rows times the weight of their group: y = x w[group]^T, and dx = dy w[group]."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.gpu.moe.row_tiles import GROUP, ROW, START, STOP
from jaxkern.pallas.moe.consumer import (
    Barriers,
    Buffers,
    pass_over,
    store,
    store_some,
    sums,
)
from jaxkern.pallas.moe.problem import (
    ALIGN,
    BLOCK_K,
    CONSUMERS,
    ROWS,
    Problem,
    place,
    slot_of,
    tiles_of,
)


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
):
    """`turned`: w is `[e, n, k]`, else `[e, k, n]`."""
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
                depth = pl.ds(pl.multiple_of(j * BLOCK_K, BLOCK_K), BLOCK_K)
                columns = pl.ds(column, c.block_n)
                plgpu.barrier_wait(signals.free.at[slot])
                full = signals.full.at[slot]
                w_at = (group, columns, depth) if turned else (group, depth, columns)
                plgpu.copy_gmem_to_smem(w_ref.at[w_at], held.b.at[slot], full)
                for w in range(CONSUMERS):
                    rows = pl.ds(first + w * ROWS, ROWS)
                    plgpu.copy_gmem_to_smem(
                        x_ref.at[rows, depth], held.a.at[slot, w], full
                    )

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
            b = held.b.at[slot]
            return held.a.at[slot, me], b.transpose((1, 0)) if turned else b

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
