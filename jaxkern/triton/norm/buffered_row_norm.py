"""Backward pass of the norms over long rows, which lie in shared memory.

A program walks over rows. While it works on one, the next ones are copied into its
shared memory, from which a row is read twice: for the means that dx needs, and for dx
and the shares of dweight and dbias, which stay in registers. So device memory is read
once. Written in Gluon, in which shared memory can be kept.
"""

from typing import Any

import jax.numpy as jnp

from jaxkern.triton.block_sizes import next_power_of_2, tuned
from jaxkern.triton.triton_call import (
    async_load,
    block_barrier,
    commit_group,
    gl,
    gluon_jit,
    max_shared_bytes,
    wait_group,
)

COPIED_BYTES = 16  # by a thread at once: each row must begin at a multiple
SUMS_BYTES = 4096  # of shared memory, for sums over a row


def buffered_rows(d: int, dtype: Any) -> dict | None:
    """Sizes of a program, or None where two rows of x and dy do not fit."""
    block, item = next_power_of_2(d), jnp.dtype(dtype).itemsize
    stages = (max_shared_bytes() - SUMS_BYTES) // (2 * block * item)
    if d * item % COPIED_BYTES or stages < 2:
        return None
    rule = {"STAGES": min(stages, 3), "WAVES": 1, "num_warps": 16}
    return tuned("buffered_row_norm_bwd", d, dtype, rule) | {"BLOCK": block}


@gluon_jit
def load_row(
    x_ptr,
    dy_ptr,
    xs,
    dys,
    slot,
    row,
    NUM_ROWS: gl.constexpr,
    D: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Begins to copy a row, or nothing beyond the last one."""
    column = gl.arange(0, xs.shape[1], LAYOUT)
    at = row.to(gl.int64) * D + column
    inside = (column < D) & (row < NUM_ROWS)
    async_load(xs.index(slot), x_ptr + at, inside, eviction_policy="evict_first")
    async_load(dys.index(slot), dy_ptr + at, inside, eviction_policy="evict_first")
    commit_group()


@gluon_jit
def row_terms(
    xs,
    dys,
    slot,
    residual_ptr,
    weight_ptr,
    at,
    column,
    inside,
    mean,
    rstd,
    OFFSET: gl.constexpr,
):
    """xhat, dy and dxhat of a row in shared memory; 0 beyond its end."""
    layout: gl.constexpr = column.type.layout
    u = xs.index(slot).load(layout).to(gl.float32)
    dy = dys.index(slot).load(layout).to(gl.float32)
    if residual_ptr is not None:
        u += gl.load(residual_ptr + at, inside, 0.0).to(gl.float32)
    xhat = gl.where(inside, (u - mean) * rstd, 0.0)
    dy = gl.where(inside, dy, 0.0)
    dxhat = dy
    if weight_ptr is not None:
        weight = gl.load(weight_ptr + column, inside, 0.0).to(gl.float32)
        dxhat = dy * (weight + OFFSET)
    return xhat, dy, dxhat


@gluon_jit
def buffered_row_norm_bwd_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dy_ptr,
    dtotal_ptr,
    dx_ptr,
    dresidual_ptr,
    dweight_ptr,
    dbias_ptr,
    NUM_ROWS: gl.constexpr,
    D: gl.constexpr,
    COUNT: gl.constexpr,
    OFFSET: gl.constexpr,
    BLOCK: gl.constexpr,
    PROGRAMS: gl.constexpr,
    STAGES: gl.constexpr,
):
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    xs = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, BLOCK], LINES)
    dys = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [STAGES, BLOCK], LINES)
    program = gl.program_id(0)
    column = gl.arange(0, BLOCK, LAYOUT)
    inside = column < D
    if dweight_ptr is not None:
        dweight = gl.zeros([BLOCK], gl.float32, LAYOUT)
    if dbias_ptr is not None:
        dbias = gl.zeros([BLOCK], gl.float32, LAYOUT)
    for k in gl.static_range(STAGES - 1):
        row = program + k * PROGRAMS
        load_row(x_ptr, dy_ptr, xs, dys, k, row, NUM_ROWS, D, LAYOUT)
    slot = 0
    for row in range(program, NUM_ROWS, PROGRAMS):
        block_barrier()  # all have read the row that lay in the slot before this one
        free = gl.where(slot == 0, STAGES - 1, slot - 1)
        later = row + (STAGES - 1) * PROGRAMS
        load_row(x_ptr, dy_ptr, xs, dys, free, later, NUM_ROWS, D, LAYOUT)
        wait_group(STAGES - 1)
        at = row.to(gl.int64) * D + column
        rstd = gl.load(rstd_ptr + row)
        mean = 0.0
        if mean_ptr is not None:
            mean = gl.load(mean_ptr + row)
        xhat, dy, dxhat = row_terms(
            xs,
            dys,
            slot,
            residual_ptr,
            weight_ptr,
            at,
            column,
            inside,
            mean,
            rstd,
            OFFSET,
        )
        along_xhat = gl.sum(dxhat * xhat, 0) / COUNT
        if mean_ptr is not None:
            along_mean = gl.sum(dxhat, 0) / D
        block_barrier()  # else the compiler keeps the row in registers, and spills
        xhat, dy, dxhat = row_terms(
            xs,
            dys,
            slot,
            residual_ptr,
            weight_ptr,
            at,
            column,
            inside,
            mean,
            rstd,
            OFFSET,
        )
        du = dxhat - xhat * along_xhat
        if mean_ptr is not None:
            du -= along_mean
        du *= rstd
        if dtotal_ptr is not None:
            du += gl.load(dtotal_ptr + at, inside, 0.0).to(gl.float32)
        if dx_ptr is not None:
            dx = du.to(dx_ptr.dtype.element_ty)
            gl.store(dx_ptr + at, dx, inside, eviction_policy="evict_first")
        if dresidual_ptr is not None:
            dresidual = du.to(dresidual_ptr.dtype.element_ty)
            gl.store(
                dresidual_ptr + at, dresidual, inside, eviction_policy="evict_first"
            )
        if dweight_ptr is not None:
            dweight += dy * xhat
        if dbias_ptr is not None:
            dbias += dy
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    wait_group(0)
    partial = program.to(gl.int64) * D + column
    if dweight_ptr is not None:
        gl.store(dweight_ptr + partial, dweight, inside)
    if dbias_ptr is not None:
        gl.store(dbias_ptr + partial, dbias, inside)
