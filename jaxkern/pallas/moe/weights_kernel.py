"""Gradients of the groups' weights: dw[g] = the sum of dy[i]^T x[i] over its rows."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.attention.wgmma import WGMMA
from jaxkern.pallas.moe.consumer import Barriers, Buffers, store, sums
from jaxkern.pallas.moe.problem import (
    ALIGN,
    BLOCK_K,
    BLOCK_M,
    CONSUMERS,
    ROWS,
    Problem,
    place,
    slot_of,
    tiles_of,
)


def weights_kernel(
    dy_ref,
    x_ref,
    starts_ref,
    stops_ref,
    dw_ref,
    held: Buffers,
    signals: Barriers,
    *,
    c: Problem,
    m: int,
):
    """dw is `[e, m, n]`; the rows of group g are those from starts[g] to stops[g].

    A fourth warpgroup clears in shared memory what is not the group's, ahead of the
    consumers.
    """
    me = lax.axis_index("warpgroup")
    program = lax.axis_index("program")
    blocks = -(-m // BLOCK_M)
    mine = tiles_of(program, jnp.int32(c.groups * blocks * c.columns), c)

    def tile(i):
        index = program + i * c.programs
        group = lax.div(index, jnp.int32(blocks * c.columns))
        within = index - group * (blocks * c.columns)
        block, column = place(within, jnp.int32(blocks), c.columns)
        start, stop = starts_ref[group], stops_ref[group]
        first = lax.div(start, jnp.int32(ALIGN)) * ALIGN
        steps = lax.div(stop - first + (BLOCK_K - 1), jnp.int32(BLOCK_K))
        steps = jnp.where(stop > start, steps, 0)
        return group, block * BLOCK_M, column * c.block_n, (start, stop, first, steps)

    def has_others(j, start, stop, first):
        """Whether a block of rows holds some of other groups."""
        top = first + j * BLOCK_K
        return (top < start) | (top + BLOCK_K > stop)

    @pl.when(me == CONSUMERS)
    def load():
        plgpu.set_max_registers(40, action="decrease")

        def load_tile(i, at):
            _, row, column, (_, _, first, steps) = tile(i)

            def step(j, _):
                slot = slot_of(at + j, c)
                depth = pl.ds(pl.multiple_of(first + j * BLOCK_K, ALIGN), BLOCK_K)
                columns = pl.ds(pl.multiple_of(column, c.block_n), c.block_n)
                plgpu.barrier_wait(signals.free.at[slot])
                full = signals.full.at[slot]
                plgpu.copy_gmem_to_smem(x_ref.at[depth, columns], held.b.at[slot], full)
                for w in range(CONSUMERS):
                    part = pl.ds(pl.multiple_of(row + w * ROWS, ROWS), ROWS)
                    plgpu.copy_gmem_to_smem(
                        dy_ref.at[depth, part], held.a.at[slot, w], full
                    )

            lax.fori_loop(0, steps, step, None)
            return at + steps

        lax.fori_loop(0, mine, load_tile, jnp.int32(0))
        for slot in range(c.stages):
            plgpu.barrier_wait(signals.free.at[slot])

    @pl.when(me == CONSUMERS + 1)
    def clear():
        """What belongs to other groups is zero: it may be what is not finite."""
        plgpu.set_max_registers(56, action="decrease")
        for slot in range(c.stages):
            plgpu.barrier_arrive(signals.free.at[slot])

        def clear_tile(i, at):
            *_, (start, stop, first, steps) = tile(i)

            def step(j, _):
                slot = slot_of(at + j, c)
                top = first + j * BLOCK_K
                plgpu.barrier_wait(signals.full.at[slot])

                @pl.when(has_others(j, start, stop, first))
                def edge():
                    for w in range(CONSUMERS):
                        clear_rows(held.a.at[slot, w], start - top, stop - top)
                    for part in range(c.block_n // ROWS):
                        columns = pl.ds(part * ROWS, ROWS)
                        b = held.b.at[slot, :, columns]
                        clear_rows(b, start - top, stop - top)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(signals.cleared.at[slot])

                plgpu.barrier_arrive(signals.free.at[slot])

            lax.fori_loop(0, steps, step, None)
            return at + steps

        lax.fori_loop(0, mine, clear_tile, jnp.int32(0))

    @pl.when(me < CONSUMERS)
    def multiply():
        plgpu.set_max_registers(208, action="increase")
        for slot in range(c.stages):
            plgpu.barrier_arrive(signals.free.at[slot])

        def product(held, slot, me):
            return held.a.at[slot, me].transpose((1, 0)), held.b.at[slot]

        def multiply_tile(i, at):
            group, row, column, (start, stop, first, steps) = tile(i)

            def await_block(j, slot):
                plgpu.barrier_wait(signals.full.at[slot])

                @pl.when(has_others(j, start, stop, first))
                def cleared():
                    plgpu.barrier_wait(signals.cleared.at[slot])

            total = sums(at, steps, me, held, signals, c, product, await_block)
            rows = pl.ds(pl.multiple_of(row + me * ROWS, ROWS), ROWS)
            whole, _ = held.out
            store(total, dw_ref.at[group, rows], column, me, whole, c)
            return at + steps

        lax.fori_loop(0, mine, multiply_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def clear_rows(ref: Any, start: Any, stop: Any) -> None:
    """Zeros in the rows of a [64, 64] tile that are not from `start` to `stop`."""
    row = plgpu.broadcasted_iota(jnp.int32, ref.shape, 0, layout=WGMMA)
    inside = (row >= start) & (row < stop)
    x = plgpu.load(ref, layout=WGMMA)
    ref[...] = jnp.where(inside, x, jnp.zeros_like(x))
