"""Gradients of RMSNorm over short rows on Hopper: the copy engine and warpgroups.

    t = dy * rstd;  dx = t * w - x * mean(t * w * x) * rstd^2;  dweight = sum(t * x)

A program walks over tiles of whole rows, one program a multiprocessor. One warpgroup
has the copy engine fill a ring of tiles; each of the others computes tiles of its own
and has the engine store them. So copies, sums and stores of different tiles overlap,
and no barrier spans the program. Rows beyond the last are zeros when they are loaded
and dropped when they are stored. A second kernel adds the programs' shares of dweight.
docs/design/triton_kernels.md has the measurements.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.gpu.device import compute_capability, num_sms
from jaxkern.gpu.rows import num_rows

FASTER = (64, 128, 192, 256)  # columns, as measured on an H200
TILE = 32  # rows that are copied at once
STEP = 16  # rows that a warpgroup computes at once
WIDTH = 64  # columns of a program that adds shares

# 8 lanes hold a row, 8 elements each and every 64 columns again.
ROWS = plgpu.Layout.TILED(Tiling(((16, 64), (4, 64), (8,))), (-5,), (-3, -2), -1)
BY_ROW, BY_COLUMN = ROWS.reduce(1), ROWS.reduce(0)
# A warp holds whole columns.
COLUMNS = plgpu.Layout.TILED(Tiling(((8, 64), (8, 16), (4,))), (-4,), (-3, -2), -1)
SUMMED = 8  # rows that it holds at least


class Problem(NamedTuple):
    """Rows, columns, what is added to the weight, sizes."""

    n: int
    d: int
    offset: float
    programs: int
    consumers: int
    depth: int  # tiles in the ring for each consumer
    stores: int  # tiles on their way back, likewise


def unsupported(x: Any, weight: Any, bias: Any, dy: Any, **_: Any) -> str | None:
    """A reason in words, or None."""
    if compute_capability() != 90:
        return f"the compute capability is {compute_capability()}, not 90 (Hopper)"
    if weight is None or bias is not None:
        return "only rows with a weight and no bias have it"
    if x.dtype not in (jnp.bfloat16, jnp.float16) or dy.dtype != x.dtype:
        return f"`x` is {x.dtype.name} and its cotangent {dy.dtype.name}"
    if jnp.issubdtype(weight.dtype, jnp.float64):
        return "`weight` is float64"
    if x.shape[-1] not in FASTER:
        return f"a row has {x.shape[-1]} columns, which is none of {FASTER}"
    return None if x.size else "there are no rows"


def problem(x: jax.Array, offset: float) -> Problem:
    n, d = num_rows(x), x.shape[-1]
    # most are as fast with 64 KB of tiles in the ring; more slows the memory down
    sizes = {"CONSUMERS": 1 if d > 192 else 2, "DEPTH": 2 if d > 64 else 3, "STORES": 2}
    # a whole number of what the second kernel adds at once; some have no tile
    programs = SUMMED * min(num_sms() // SUMMED, -(-n // (SUMMED * TILE)))
    consumers, depth, stores = (sizes[s] for s in ("CONSUMERS", "DEPTH", "STORES"))
    return Problem(n, d, offset, programs, consumers, depth, stores)


def per_row(x: jax.Array, like: jax.Array) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(x, like.shape, [0]), ROWS)


def per_column(x: jax.Array, like: jax.Array) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(x, like.shape, [1]), ROWS)


def store(ref: Any, x: jax.Array) -> None:
    """Also where banks of shared memory collide, which jax refuses from 0.12 on."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def walk_kernel(
    x_ref, weight_ref, rstd_ref, dy_ref, dx_ref, share_ref, buffers, barriers, *, c
):
    """dx of the tiles of one program, and its share of dweight."""
    x_smem, dy_smem, rstd_smem, dx_smem, sums_smem = buffers
    full, free, summed = barriers
    me, program = lax.axis_index("warpgroup"), lax.axis_index("program")
    slots = jnp.int32(c.consumers * c.depth)  # a slot is always of one consumer
    tiles = -(-c.n // TILE)
    count = lax.div(tiles - program + c.programs - 1, jnp.int32(c.programs))

    # whole tiles are plain runs of memory: no tensor map has to be read first
    oob = plgpu.OOBFillMode.PROMISE_IN_BOUNDS if c.n % TILE == 0 else None

    def place(j):
        return pl.ds((program + j * c.programs) * TILE, TILE)

    @pl.when(me == c.consumers)
    def load():
        def fetch(j, _):
            slot = lax.rem(j, slots)

            @pl.when(j >= slots)
            def _():
                plgpu.barrier_wait(free.at[slot])

            for source, target in (
                (x_ref, x_smem),
                (dy_ref, dy_smem),
                (rstd_ref, rstd_smem),
            ):
                plgpu.copy_gmem_to_smem(
                    source.at[place(j)], target.at[slot], full.at[slot], oob_mode=oob
                )

        def end(j, _):
            plgpu.barrier_wait(free.at[lax.rem(j, slots)])

        lax.fori_loop(0, count, fetch, None)
        lax.fori_loop(count - lax.min(count, slots), count, end, None)

    @pl.when(me < c.consumers)
    def differentiate():
        weight = plgpu.load(weight_ref, layout=BY_COLUMN, optimized=False)
        weight = weight.astype(jnp.float32) + c.offset

        def step(i, dweight):
            j = me + i * c.consumers
            slot, back = lax.rem(j, slots), lax.rem(i, jnp.int32(c.stores))
            plgpu.barrier_wait(full.at[slot])
            plgpu.wait_smem_to_gmem(c.stores - 1, wait_read_only=True)
            for first in range(0, TILE, STEP):
                rows = pl.ds(first, STEP)
                x, dy = (
                    plgpu.load(smem.at[slot, rows], layout=ROWS, optimized=False)
                    for smem in (x_smem, dy_smem)
                )
                rstd = plgpu.load(
                    rstd_smem.at[slot, rows], layout=BY_ROW, optimized=False
                )
                x = x.astype(jnp.float32)
                t = dy.astype(jnp.float32) * per_row(rstd, x)
                dxhat = t * per_column(weight, x)
                along = jnp.sum(dxhat * x, axis=1) * (rstd * rstd * (1 / c.d))
                dx = dxhat - x * per_row(along, x)
                dx_smem.at[me, back, rows][...] = dx.astype(dx_ref.dtype)
                dweight = dweight + t * x
            plgpu.barrier_arrive(free.at[slot])
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(dx_smem.at[me, back], dx_ref.at[place(j)])
            return dweight

        zeros = plgpu.layout_cast(jnp.zeros((STEP, c.d), jnp.float32), ROWS)
        mine = lax.div(count - me + c.consumers - 1, jnp.int32(c.consumers))
        dweight = lax.fori_loop(0, mine, step, zeros)
        store(sums_smem.at[pl.ds(me * STEP, STEP)], dweight)
        plgpu.barrier_arrive(summed)

        @pl.when(me == 0)
        def _():
            plgpu.barrier_wait(summed)
            sums = plgpu.load(sums_smem, layout=COLUMNS, optimized=False)
            share_ref.at[program][...] = jnp.sum(sums, axis=0)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def add_kernel(shares_ref, sum_ref):
    """Some columns of dweight."""
    columns = pl.ds(lax.axis_index("program") * WIDTH, WIDTH)
    shares = plgpu.load(shares_ref.at[:, columns], layout=COLUMNS, optimized=False)
    sum_ref.at[columns][...] = jnp.sum(shares, axis=0).astype(sum_ref.dtype)


def launch(kernel: Any, interpret: bool, **rest: Any) -> Any:
    return plgpu.kernel(
        kernel,
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(
            # rows lie in shared memory as in memory, and no barrier is added
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        **rest,
    )


def rms_norm_bwd(
    x: jax.Array,
    weight: jax.Array,
    bias: None,
    rstd: jax.Array,
    dy: jax.Array,
    *,
    eps: float,
    offset: float,
    wanted: tuple[bool, ...],
    interpret: bool = False,
) -> tuple[jax.Array | None, jax.Array | None, None]:
    """(dx, dweight, None); `interpret` runs the kernels on a CPU."""
    del eps, bias  # in rstd; absent
    c = problem(x, offset)
    slots, tile = c.consumers * c.depth, (TILE, c.d)
    dx, shares = launch(
        functools.partial(walk_kernel, c=c),
        interpret,
        out_type=(
            jax.ShapeDtypeStruct((c.n, c.d), x.dtype),
            jax.ShapeDtypeStruct((c.programs, c.d), jnp.float32),
        ),
        grid=(c.programs,),
        num_threads=c.consumers + 1,
        thread_name="warpgroup",
        scratch_types=(
            (
                plgpu.SMEM((slots, *tile), x.dtype),
                plgpu.SMEM((slots, *tile), x.dtype),
                plgpu.SMEM((slots, TILE), jnp.float32),
                plgpu.SMEM((c.consumers, c.stores, *tile), x.dtype),
                plgpu.SMEM((c.consumers * STEP, c.d), jnp.float32),
            ),
            (
                plgpu.Barrier(num_barriers=slots, num_arrivals=3),
                plgpu.Barrier(num_barriers=slots),
                plgpu.Barrier(num_arrivals=c.consumers),
            ),
        ),
    )(x.reshape(c.n, c.d), weight, rstd.reshape(c.n), dy.reshape(c.n, c.d))
    dx = dx.reshape(x.shape) if wanted[0] else None
    if not wanted[1]:
        return dx, None, None
    out = jax.ShapeDtypeStruct((c.d,), weight.dtype)
    return (
        dx,
        launch(add_kernel, interpret, out_type=out, grid=(c.d // WIDTH,))(shares),
        None,
    )
