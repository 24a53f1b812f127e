"""What both kernels of the grouped products share: buffers, sums, the way to memory."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.pallas.attention.attention.wgmma import swizzled, tiled
from jaxkern.pallas.moe.problem import (
    CONSUMERS,
    PIECE_BYTES,
    ROWS,
    Problem,
    slot_of,
)

FLOAT8 = jnp.float8_e4m3fn


class Buffers(NamedTuple):
    """Shared memory. `a` has a part for each consumer.

    A block of bytes is two: what copies write and what WGMMA reads, the same memory.
    """

    a: Any
    b: Any
    out: Any  # (as WGMMA leaves it, row by row), which are the same memory


class Barriers(NamedTuple):
    full: Any
    free: Any
    cleared: Any  # a block holds nothing of other groups any more


def buffers(c: Problem, a: tuple, b: tuple, dtype: Any, interpret: bool) -> Buffers:
    """`a`, `b`: shapes of the blocks that a step multiplies."""
    return Buffers(
        a=plgpu.SMEM((c.stages, CONSUMERS, *a), dtype, transforms=tiled(*a)),
        b=plgpu.SMEM((c.stages, *b), dtype, transforms=tiled(*b)),
        out=results(c, dtype, interpret),
    )


def buffers_of_bytes(c: Problem, swizzle: int, dtype: Any, interpret: bool) -> Buffers:
    """Blocks of e4m3, whose arrays are bytes, for results of `dtype`."""
    dtypes = (FLOAT8,) if interpret else (jnp.uint8, FLOAT8)

    def ring(*shape):
        tiles = swizzled(swizzle, itemsize=1)
        views = [plgpu.SMEM(shape, held, transforms=tiles) for held in dtypes]
        return tuple(views) if interpret else plgpu.RefUnion(*views)

    return Buffers(
        a=ring(c.stages, CONSUMERS, ROWS, c.block_k),
        b=ring(c.stages, c.block_n, c.block_k),
        out=results(c, dtype, interpret),
    )


def results(c: Problem, dtype: Any, interpret: bool) -> Any:
    """Pieces of results on their way to memory."""
    itemsize = jnp.dtype(dtype).itemsize
    pieces = CONSUMERS, c.buffers, ROWS, PIECE_BYTES // itemsize
    out = (
        plgpu.SMEM(pieces, dtype, transforms=swizzled(PIECE_BYTES, itemsize)),
        plgpu.SMEM(pieces, dtype),
    )
    # the interpreter knows no two views of one memory
    return out if interpret else plgpu.RefUnion(*out)


def as_copied(block: Any) -> Any:
    """A block of the ring, for what writes it."""
    return block[0] if isinstance(block, tuple) else block


def as_multiplied(block: Any) -> Any:
    """A block of the ring, for WGMMA."""
    return block[-1] if isinstance(block, tuple) else block


def barriers(c: Problem) -> Barriers:
    return Barriers(
        full=plgpu.Barrier(num_barriers=c.stages, num_arrivals=CONSUMERS + 1),
        free=plgpu.Barrier(num_barriers=c.stages, num_arrivals=CONSUMERS),
        cleared=plgpu.Barrier(num_barriers=c.stages),
    )


def sums(
    at: Any,
    steps: Any,
    me: Any,
    held: Buffers,
    signals: Barriers,
    c: Problem,
    product: Callable[[Any, Any, Any], tuple[Any, Any]],
    await_block: Callable[[Any, Any], None],
) -> Any:
    """The sums of a tile over `steps` blocks of the ring, the first of which is `at`.

    `product`: (a, b) of WGMMA from a slot. `await_block`: waits for a step's slot.
    """

    def scoped(acc):
        def step(j, _):
            slot = slot_of(at + j, c)
            await_block(j, slot)
            plgpu.wgmma(acc, *product(held, slot, me))
            plgpu.wgmma_wait(1)

            @pl.when(j > 0)
            def release():
                plgpu.barrier_arrive(signals.free.at[slot_of(at + j - 1, c)])

        lax.fori_loop(0, steps, step, None)
        return acc[...]

    shape = plgpu.WGMMAAccumulatorRef((ROWS, c.block_n), jnp.float32)
    total = pl.run_scoped(scoped, shape)

    @pl.when(steps > 0)
    def release_last():
        plgpu.barrier_arrive(signals.free.at[slot_of(at + steps - 1, c)])

    return total


def pass_over(at: Any, steps: Any, signals: Barriers, c: Problem) -> None:
    """Frees the blocks of a tile that the others multiply."""

    def step(j, _):
        slot = slot_of(at + j, c)
        plgpu.barrier_wait(signals.full.at[slot])
        plgpu.barrier_arrive(signals.free.at[slot])

    lax.fori_loop(0, steps, step, None)


def store(total: Any, target: Any, column: Any, me: Any, out: Any, c: Problem) -> None:
    """The columns of a tile to `target`, by way of a few buffers."""
    wide = out.shape[-1]
    for i in range(c.block_n // wide):
        staged = out.at[me, i % c.buffers]
        plgpu.wait_smem_to_gmem(c.buffers - 1, wait_read_only=True)
        piece = total[:, i * wide : (i + 1) * wide]
        staged[...] = piece.astype(out.dtype)
        plgpu.commit_smem()
        columns = pl.ds(column + i * wide, wide)
        plgpu.copy_smem_to_gmem(staged, target.at[:, columns])


def store_some(
    total: Any,
    target: Any,
    column: Any,
    me: Any,
    out: Any,
    c: Problem,
    row: Any,
    start: Any,
    stop: Any,
) -> None:
    """Rows `start` to `stop` of a tile, which begins at `row` of `target`, likewise.

    A copy has a static number of rows: as many copies as `stop - start` has bits.
    """
    wide = out.shape[-1]
    for i in range(c.block_n // wide):
        staged = out.at[me, i % c.buffers]
        plgpu.wait_smem_to_gmem(c.buffers - 1, wait_read_only=True)
        piece = total[:, i * wide : (i + 1) * wide]
        staged[...] = piece.astype(out.dtype)
        plgpu.commit_smem()
        columns = pl.ds(column + i * wide, wide)
        at = start
        for bit in range(ROWS.bit_length()):
            rows = 1 << bit
            some = lax.bitwise_and(stop - start, rows)

            @pl.when(some != 0)
            def copy(at=at, rows=rows, staged=staged, columns=columns):
                plgpu.copy_smem_to_gmem(
                    staged.at[pl.ds(at, rows)],
                    target.at[pl.ds(row + at, rows), columns],
                    commit_group=False,
                )

            at = at + some
        plgpu.commit_smem_to_gmem_group()
