"""Gradients of the groups' weights: dw[g] = the sum of dy[i]^T x[i] over its rows."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.attention.attention.wgmma import WGMMA
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

BEHIND = 2  # blocks between what is asked for and what is cleared; fewer than stages


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

    The loader clears in shared memory what is not the group's: of the block before the
    last one that it asked for, which has come by then and is not needed yet.
    """
    me = lax.axis_index("warpgroup")
    tiles = Tiles(lax.axis_index("program"), starts_ref, stops_ref, c, m)

    @pl.when(me == CONSUMERS)
    def loads():
        load(tiles, dy_ref, x_ref, held, signals)

    @pl.when(me < CONSUMERS)
    def multiplies():
        multiply(tiles, dw_ref, held, signals, me)


class Tiles:
    """The tiles of dw that a program computes, `mine` of them."""

    def __init__(self, program: Any, starts_ref: Any, stops_ref: Any, c: Problem, m):
        self.program, self.c = program, c
        self.starts_ref, self.stops_ref = starts_ref, stops_ref
        self.blocks = -(-m // BLOCK_M)
        all_tiles = jnp.int32(c.groups * self.blocks * c.columns)
        self.mine = tiles_of(program, all_tiles, c)

    def tile(self, i: Any) -> tuple:
        """(group, first row, first column, (start, stop, first, steps)) of the i-th.

        The group's rows are start ... stop - 1, which `steps` blocks from `first` on
        hold.
        """
        c, blocks = self.c, self.blocks
        index = self.program + i * c.programs
        group = lax.div(index, jnp.int32(blocks * c.columns))
        within = index - group * (blocks * c.columns)
        block, column = place(within, jnp.int32(blocks), c.columns)
        start, stop = self.starts_ref[group], self.stops_ref[group]
        first = lax.div(start, jnp.int32(ALIGN)) * ALIGN
        steps = lax.div(stop - first + (BLOCK_K - 1), jnp.int32(BLOCK_K))
        steps = jnp.where(stop > start, steps, 0)
        return group, block * BLOCK_M, column * c.block_n, (start, stop, first, steps)


def inside(j: Any, start: Any, stop: Any, first: Any) -> tuple[Any, Any]:
    """Which rows of a block are the group's: from, to."""
    top = first + j * BLOCK_K
    return start - top, stop - top


def load(
    tiles: Tiles, dy_ref: Any, x_ref: Any, held: Buffers, signals: Barriers
) -> None:
    """The warpgroup that asks for blocks and clears what has come of other groups."""
    c = tiles.c
    plgpu.set_max_registers(56, action="decrease")

    def clear(at, rows):
        """What belongs to other groups is zero: it may be what is not finite."""
        slot = slot_of(at, c)
        plgpu.barrier_wait(signals.full.at[slot])

        @pl.when(has_others(rows))
        def edge():
            for w in range(CONSUMERS):
                clear_rows(held.a.at[slot, w], rows)
            for part in range(c.block_n // ROWS):
                columns = pl.ds(part * ROWS, ROWS)
                clear_rows(held.b.at[slot, :, columns], rows)
            plgpu.commit_smem()
            plgpu.barrier_arrive(signals.cleared.at[slot])

    def load_tile(i, carry):
        _, row, column, (start, stop, first, steps) = tiles.tile(i)
        at, before = carry

        def step(j, before):
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
            oldest, *younger = before

            @pl.when(at + j >= BEHIND)
            def clear_what_has_come():
                clear(at + j - BEHIND, oldest)

            return (*younger, inside(j, start, stop, first))

        return at + steps, lax.fori_loop(0, steps, step, before)

    none = (jnp.int32(0), jnp.int32(BLOCK_K))
    blocks_in_all, last = lax.fori_loop(
        0, tiles.mine, load_tile, (jnp.int32(0), (none,) * BEHIND)
    )
    for i, rows in enumerate(last):

        @pl.when(blocks_in_all + i >= BEHIND)
        def clear_the_last(i=i, rows=rows):
            clear(blocks_in_all + i - BEHIND, rows)

    for slot in range(c.stages):
        plgpu.barrier_wait(signals.free.at[slot])


def multiply(
    tiles: Tiles, dw_ref: Any, held: Buffers, signals: Barriers, me: Any
) -> None:
    """The warpgroups that compute: ROWS rows of each tile of dw."""
    c = tiles.c
    plgpu.set_max_registers(224, action="increase")
    for slot in range(c.stages):
        plgpu.barrier_arrive(signals.free.at[slot])

    def product(held, slot, me):
        return held.a.at[slot, me].transpose((1, 0)), held.b.at[slot]

    def multiply_tile(i, at):
        group, row, column, (start, stop, first, steps) = tiles.tile(i)

        def await_block(j, slot):
            plgpu.barrier_wait(signals.full.at[slot])

            @pl.when(has_others(inside(j, start, stop, first)))
            def cleared():
                plgpu.barrier_wait(signals.cleared.at[slot])

        total = sums(at, steps, me, held, signals, c, product, await_block)
        rows = pl.ds(pl.multiple_of(row + me * ROWS, ROWS), ROWS)
        whole, _ = held.out
        store(total, dw_ref.at[group, rows], column, me, whole, c)
        return at + steps

    lax.fori_loop(0, tiles.mine, multiply_tile, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def has_others(rows: tuple[Any, Any]) -> Any:
    start, stop = rows
    return (start > 0) | (stop < BLOCK_K)


def clear_rows(ref: Any, rows: tuple[Any, Any]) -> None:
    """Zeros in the rows of a [64, 64] tile that are not from `start` to `stop`."""
    start, stop = rows
    row = plgpu.broadcasted_iota(jnp.int32, ref.shape, 0, layout=WGMMA)
    inside = (row >= start) & (row < stop)
    x = plgpu.load(ref, layout=WGMMA)
    ref[...] = jnp.where(inside, x, jnp.zeros_like(x))
