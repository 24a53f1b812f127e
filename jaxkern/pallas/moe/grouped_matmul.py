"""Grouped products on Hopper: TMA, WGMMA, specialised warpgroups, persistent programs.

A program is one loader warpgroup and two consumers, and takes many tiles of 128 rows.
The loader keeps a ring of blocks of both operands full, also of the next tile while the
last one is written. Tiles belong to one group each: `row_tiles` lists them on the
device. They begin at a multiple of 8 rows, since the copy engine moves tiles of 8, so
the first of a group may hold rows of others; only rows of the group are stored.

The gradient of the weights sums over the rows of a group. In the first and the last
block of them the loader clears in shared memory what belongs to others. Nothing is
added in an order that changes between runs. docs/design/grouped_products.md has
measurements.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkern.gpu.device import compute_capability, num_sms
from jaxkern.gpu.moe.row_tiles import group_rows, row_tiles
from jaxkern.pallas.moe.consumer import Buffers, barriers, buffers
from jaxkern.pallas.moe.problem import (
    ALIGN,
    BLOCK_K,
    BLOCK_M,
    CONSUMERS,
    ROWS,
    WIDTH,
    Problem,
)
from jaxkern.pallas.moe.rows_kernel import rows_kernel
from jaxkern.pallas.moe.weights_kernel import weights_kernel
from jaxkern.pallas.mosaic_launch import kernel_name

FEW_ROWS = 32  # of a group in the mean, up to which reading the weights decides


def unsupported(x: Any, w: Any, dy: Any = None, **rest: Any) -> str | None:
    """A reason in words, or None."""
    if rest.get("preferred_element_type") is not None:
        return "`preferred_element_type`: the kernels round to the dtype of x"
    if why := unsupported_dims(x, w):
        return why
    named = {"x": x, "w": w} | ({} if dy is None else {"dy": dy})
    if len({a.dtype for a in named.values()}) > 1:
        return f"{', '.join(f'`{n}` is {a.dtype.name}' for n, a in named.items())}"
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"`x` is {x.dtype.name}"
    return None


def unsupported_dims(x: Any, w: Any) -> str | None:
    """Why no kernel of grouped products takes these dims here, or None."""
    if compute_capability() != 90:
        return f"the compute capability is {compute_capability()}, not 90 (Hopper)"
    if not x.size * w.size:
        return "an operand is empty"
    _, f, d = w.shape
    if f % WIDTH or d % WIDTH:
        return f"`w` is [e, {f}, {d}], not of multiples of {WIDTH}"
    if min(f, d) <= WIDTH:
        # Of a dim of one tile Mosaic drops the tile's index: a copy from beyond such an
        # array, which the copy engine would leave out, is one from its first tile.
        return f"`w` is [e, {f}, {d}], a dim of a single tile of {WIDTH}"
    return None


def slower(x: Any, w: Any, **_: Any) -> str | None:
    """Why "auto" leaves these operands to the next row, or None."""
    if x.shape[0] < FEW_ROWS * w.shape[0]:
        return f"{x.shape[0]} rows are fewer than {FEW_ROWS} for each group"
    return None


STAGES = 4  # more than BEHIND: a loader would wait for what it has not cleared


def problem(groups: int, n: int, k: int, block_k: int = BLOCK_K) -> Problem:
    return Problem(
        groups=groups,
        n=n,
        k=k,
        block_n=min(256, -(-n // 128) * 128),
        block_k=block_k,
        stages=STAGES,
        buffers=2,
        programs=num_sms(),
    )


def whole_tiles(x: jax.Array) -> jax.Array:
    """x with zeros behind its rows: the copy engine moves 8, and at least a block."""
    rows = max(-(-x.shape[0] // ALIGN) * ALIGN, BLOCK_M)
    return jnp.pad(x, ((0, rows - x.shape[0]), (0, 0)))


def launch(body, name, c: Problem, held: Buffers, out, interpret, *operands):
    return plgpu.kernel(
        body,
        out_type=out,
        grid=(c.programs,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name=kernel_name(name, columns=c.block_n, stages=c.stages),
        scratch_types=(held, barriers(c)),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(*operands)


def multiply(name, x, w, group_sizes, turned, interpret):
    e, n, k = w.shape if turned else (w.shape[0], w.shape[2], w.shape[1])
    r = x.shape[0]
    c = problem(e, n, k)
    tiles, count = row_tiles(group_sizes, r, BLOCK_M, ALIGN)
    x = whole_tiles(x)
    b = (c.block_n, BLOCK_K) if turned else (BLOCK_K, c.block_n)
    out = jax.ShapeDtypeStruct((x.shape[0], n), x.dtype)
    body = functools.partial(rows_kernel, c=c, turned=turned)
    held = buffers(c, (ROWS, BLOCK_K), b, x.dtype, interpret)
    y = launch(body, name, c, held, out, interpret, x, w, tiles, count)
    return y[:r]


def grouped_matmul(x, w, group_sizes, *, preferred_element_type=None, interpret=False):
    """y `[r, f]`; `interpret` runs the kernel on a CPU."""
    del preferred_element_type  # refused
    return multiply("grouped_matmul", x, w, group_sizes, True, interpret)


def grouped_matmul_bwd(
    x,
    w,
    group_sizes,
    dy,
    *,
    preferred_element_type=None,
    wanted=(True, True),
    interpret=False,
):
    """(dx, dw), None for what is not wanted."""
    del preferred_element_type  # refused
    dx = dw = None
    if wanted[0]:
        dx = multiply("grouped_matmul_dx", dy, w, group_sizes, False, interpret)
    if wanted[1]:
        e, f, d = w.shape
        c = problem(e, d, 0)
        blocks = (BLOCK_K, ROWS), (BLOCK_K, c.block_n)
        starts, stops = group_rows(group_sizes, x.shape[0])
        dw = launch(
            functools.partial(weights_kernel, c=c, m=f),
            "grouped_matmul_dw",
            c,
            buffers(c, *blocks, w.dtype, interpret),
            jax.ShapeDtypeStruct(w.shape, w.dtype),
            interpret,
            whole_tiles(dy),
            whole_tiles(x),
            starts,
            stops,
        )
    return dx, dw
