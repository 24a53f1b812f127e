"""Backward of RMSNorm over long rows: further rows arrive while one is worked on.

A program walks over rows. Copies into shared memory, QUEUED rows of x and dy, are under
way all the time: a chunk of the row in work is overwritten as soon as it was read for
the second time. The sums for the weight stay in registers, and so does the weight where
both fit. Chunks waste little where the length is no power of 2. Written in Gluon, where
copies are issued by hand.
"""
# ruff: noqa: RUF005 - Triton compiles `a + (b,)` but not `(*a, b)`

from collections.abc import Callable

import jax

from jaxkern.gpu.device import WARP, next_power_of_2, num_sms
from jaxkern.gpu.rows import num_rows
from jaxkern.gpu.triton_call import (
    async_copy,
    async_load,
    gl,
    gluon_jit,
    max_shared_bytes,
    sparse_call,
)

LONGEST = 32768  # beyond, the sums for the weight no longer fit in registers
WEIGHT_IN_REGISTERS = 49152  # bytes


def stream_sizes(x: jax.Array, weight: jax.Array | None) -> dict | None:
    """Chunks of a row, and as many rows ahead as shared memory holds.

    None where tiles of rows are as fast, or rows cannot be copied 16 bytes at a time. A
    tile has a power of 2 elements a row: a fifth of it wasted is too much.
    """
    rows, d = num_rows(x), x.shape[-1]
    if x.dtype.itemsize != 2 or d % 8 or not 2048 < d <= LONGEST:
        return None
    if d <= 8192 and 5 * d > 4 * next_power_of_2(d):
        return None
    waves = 1 if d > 8192 else 2 if d > 4096 else 4  # as measured on an H200
    sizes = {"BLOCK": 4096 // waves, "WAVES": waves, "num_warps": 16 // waves}
    waves, block = sizes.pop("WAVES"), sizes["BLOCK"]
    columns = block * -(-d // block)
    weight_bytes = 0 if weight is None else columns * weight.dtype.itemsize
    shared_weight = weight_bytes > WEIGHT_IN_REGISTERS
    spared = max_shared_bytes() // waves - 1024  # for sums over warps
    ahead = (spared - weight_bytes * shared_weight) // (4 * columns)
    if ahead < 1:
        return None
    long = waves == 1
    programs = even_programs(rows) if long else min(rows, waves * num_sms())
    return sizes | {
        "QUEUED": min(2 if long else 3, ahead),  # as measured
        "SHARED_WEIGHT": shared_weight,
        "NUM_ROWS": rows,
        "PROGRAMS": programs,
        "max_registers": min(255, 65536 // (waves * sizes["num_warps"] * WARP)),
    }


def even_programs(rows: int) -> int:
    """The fewest programs of which none has more rows than if each SM ran one."""
    most = -(-rows // num_sms())
    return -(-rows // max(1, most))


@gluon_jit
def add(a, b):
    return a + b


@gluon_jit
def copy_chunk(
    buffer, slot, x_ptr, dy_ptr, row, at, NUM_ROWS: gl.constexpr, D: gl.constexpr
):
    """Issues the copy of a chunk of x and of dy; of nothing after the last row."""
    inside = (at < D) & (row < NUM_ROWS)
    at += row * D
    to = buffer.index(2 * slot)
    async_load(to, x_ptr + at, inside, eviction_policy="evict_first")
    to = buffer.index(2 * slot + 1)
    async_load(to, dy_ptr + at, inside, eviction_policy="evict_first")
    async_copy.commit_group()


@gluon_jit
def chunk(buffer, slot, LAYOUT: gl.constexpr):
    x = buffer.index(2 * slot).load(LAYOUT)
    dy = buffer.index(2 * slot + 1).load(LAYOUT)
    return x.to(gl.float32), dy.to(gl.float32)


@gluon_jit
def scaled(dy, weight, k: gl.constexpr, OFFSET: gl.constexpr, SHARED: gl.constexpr):
    """dy times chunk k of the weight, where there is one."""
    if len(weight) > 0:
        w = weight[k]
        if SHARED:
            w = w.load(dy.type.layout)
        w = w.to(gl.float32)
        if OFFSET != 0.0:
            w += OFFSET
        dy = dy * w
    return dy


@gluon_jit
def streamed_row_norm_bwd_kernel(
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dy_ptr,
    dx_ptr,
    dweight_ptr,
    NUM_ROWS: gl.constexpr,
    D: gl.constexpr,
    COUNT: gl.constexpr,
    OFFSET: gl.constexpr,
    BLOCK: gl.constexpr,
    QUEUED: gl.constexpr,
    SHARED_WEIGHT: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    CHUNKS: gl.constexpr = (D + BLOCK - 1) // BLOCK
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # float32 leaves in whole sectors of memory
    SUMS: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    columns = gl.arange(0, BLOCK, LAYOUT)
    first = gl.program_id(0).to(gl.int64)
    buffers = ()
    weight = ()
    dweight = ()
    for k in gl.static_range(CHUNKS):
        buffer = gl.allocate_shared_memory(
            x_ptr.dtype.element_ty, [2 * QUEUED, BLOCK], SHARED
        )
        buffers = buffers + (buffer,)
        dweight = dweight + (gl.zeros([BLOCK], gl.float32, LAYOUT),)
        if weight_ptr is not None:
            at = k * BLOCK + columns
            w = gl.load(weight_ptr + at, at < D, 0.0)
            if SHARED_WEIGHT:
                w = gl.allocate_shared_memory(w.dtype, [BLOCK], SHARED, w)
            weight = weight + (w,)
    for ahead in gl.static_range(QUEUED):
        row = first + ahead * PROGRAMS
        for k in gl.static_range(CHUNKS):
            at = k * BLOCK + columns
            copy_chunk(buffers[k], ahead, x_ptr, dy_ptr, row, at, NUM_ROWS, D)
    slot = 0
    for row in range(first, NUM_ROWS, PROGRAMS):
        rstd = gl.load(rstd_ptr + row)
        products = gl.zeros([BLOCK], gl.float32, LAYOUT)
        for k in gl.static_range(CHUNKS):
            async_copy.wait_group(QUEUED * CHUNKS - 1 - k)
            x, dy = chunk(buffers[k], slot, LAYOUT)
            products += x * scaled(dy, weight, k, OFFSET, SHARED_WEIGHT)
        along_x = gl.reduce(products, 0, add) * rstd / COUNT * rstd * rstd
        further = row + QUEUED * PROGRAMS
        sums = ()
        for k in gl.static_range(CHUNKS):
            x, dy = chunk(buffers[k], slot, LAYOUT)
            dy = dy * rstd
            at = k * BLOCK + columns
            copy_chunk(buffers[k], slot, x_ptr, dy_ptr, further, at, NUM_ROWS, D)
            sums = sums + (dweight[k] + dy * x,)
            if dx_ptr is not None:
                dxhat = scaled(dy, weight, k, OFFSET, SHARED_WEIGHT)
                du = dxhat - x * along_x
                to = dx_ptr + row * D + at
                du = du.to(dx_ptr.dtype.element_ty)
                gl.store(to, du, at < D, eviction_policy="evict_first")
        dweight = sums
        slot = (slot + 1) % QUEUED
    async_copy.wait_group(0)
    if dweight_ptr is not None:
        for k in gl.static_range(CHUNKS):
            at = k * BLOCK + gl.arange(0, BLOCK, SUMS)
            to = dweight_ptr + first * D + at
            sums = gl.convert_layout(dweight[k], SUMS)
            gl.store(to, sums, at < D, eviction_policy="evict_last")  # read next


def streamed_row_norm_bwd(
    given: dict, results: Callable, constants: dict
) -> tuple[jax.Array | None, ...]:
    """Gradients of x and weight, with partial sums as `results` of a number says."""
    programs = constants["PROGRAMS"]
    return sparse_call(
        streamed_row_norm_bwd_kernel,
        (programs,),
        {n: given[n] for n in ("x_ptr", "weight_ptr", "rstd_ptr", "dy_ptr")},
        {n: results(programs)[n] for n in ("dx_ptr", "dweight_ptr")},
        constants,
    )
