"""Softmax of long rows: a row lies in shared memory, the next arrives meanwhile.

Programs walk over rows, as many beside each other as the memory of a multiprocessor
holds rows. A chunk that was read for the second time is overwritten by the next row's,
so that reads and writes take turns. Written in Gluon, where copies are issued by hand.
"""
# ruff: noqa: RUF005 - Triton compiles `a + (b,)` but not `(*a, b)`

from typing import Any

import jax

from jaxkern.gpu.device import WARP, num_sms
from jaxkern.gpu.rows import num_rows
from jaxkern.gpu.triton_call import (
    async_copy,
    async_load,
    gl,
    gluon_jit,
    like,
    max_shared_bytes,
    sparse_call,
)

SHORTEST, LONGEST = 16384, 65536


def stream_sizes(x: jax.Array) -> dict | None:
    """As measured on an H200.

    None where a row fits in registers, or in no shared memory, or cannot be copied 16
    bytes at a time.
    """
    rows, d = num_rows(x), x.shape[-1]
    if x.dtype.itemsize != 2 or d % 8 or not SHORTEST < d <= LONGEST:
        return None
    warps = 8 if d <= 32768 else 16
    sizes = {"BLOCK": 256 * warps, "num_warps": warps}
    row_bytes = 2 * sizes["BLOCK"] * -(-d // sizes["BLOCK"])
    waves = min(max_shared_bytes() // (row_bytes + 2048), 4)
    if waves < 1:
        return None
    registers = 65536 // (waves * sizes["num_warps"] * WARP) // 8 * 8
    return sizes | {
        "D": d,
        "NUM_ROWS": rows,
        "PROGRAMS": min(rows, waves * num_sms()),
        "max_registers": min(255, registers),
    }


@gluon_jit
def add(a, b):
    return a + b


@gluon_jit
def larger(a, b):
    return gl.maximum(a, b)


@gluon_jit
def copy_chunk(to, x_ptr, row, at, NUM_ROWS: gl.constexpr, D: gl.constexpr):
    """Issues the copy of a chunk; of nothing after the last row."""
    inside = (at < D) & (row < NUM_ROWS)
    async_load(to, x_ptr + row * D + at, inside, eviction_policy="evict_first")
    async_copy.commit_group()


@gluon_jit
def logits(
    buffers,
    k: gl.constexpr,
    columns,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
    SCALE: gl.constexpr,
):
    """Chunk k, scaled; minus infinity beyond the row."""
    if k < len(buffers):
        z = buffers[k].load(columns.type.layout).to(gl.float32) * SCALE
        if k * BLOCK + BLOCK > D:
            z = gl.where(k * BLOCK + columns < D, z, -float("inf"))
    else:
        z = gl.full([BLOCK], -float("inf"), gl.float32, columns.type.layout)
    return z


@gluon_jit
def finite(top):
    """What is subtracted: 0 for a maximum of nothing."""
    return gl.where(top == -float("inf"), 0.0, top)


@gluon_jit
def streamed_softmax_kernel(
    x_ptr,
    y_ptr,
    NUM_ROWS: gl.constexpr,
    D: gl.constexpr,
    SCALE: gl.constexpr,
    BLOCK: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    CHUNKS: gl.constexpr = (D + BLOCK - 1) // BLOCK
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    columns = gl.arange(0, BLOCK, LAYOUT)
    first = gl.program_id(0).to(gl.int64)
    buffers = ()
    for k in gl.static_range(CHUNKS):
        buffer = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [BLOCK], SHARED)
        copy_chunk(buffer, x_ptr, first, k * BLOCK + columns, NUM_ROWS, D)
        buffers = buffers + (buffer,)
    for row in range(first, NUM_ROWS, PROGRAMS):
        # each lane keeps maximum and sum of its columns, raised once for two chunks
        top = gl.full([BLOCK], -float("inf"), gl.float32, LAYOUT)
        total = gl.zeros([BLOCK], gl.float32, LAYOUT)
        for k in gl.static_range(0, CHUNKS, 2):
            async_copy.wait_group(CHUNKS - 2 - k if k + 2 <= CHUNKS else 0)
            a = logits(buffers, k, columns, D, BLOCK, SCALE)
            b = logits(buffers, k + 1, columns, D, BLOCK, SCALE)
            higher = gl.maximum(top, gl.maximum(a, b))
            base = finite(higher)
            total = total * gl.exp(top - base) + gl.exp(a - base) + gl.exp(b - base)
            top = higher
        peak = finite(gl.reduce(top, 0, larger))
        total = gl.reduce(total * gl.exp(top - peak), 0, add)
        factor = 1.0 / gl.where(total == 0.0, 1.0, total)
        for k in gl.static_range(CHUNKS):
            y = gl.exp(logits(buffers, k, columns, D, BLOCK, SCALE) - peak) * factor
            at = k * BLOCK + columns
            copy_chunk(buffers[k], x_ptr, row + PROGRAMS, at, NUM_ROWS, D)
            to = y_ptr + row * D + at
            y = y.to(y_ptr.dtype.element_ty)
            gl.store(to, y, at < D, eviction_policy="evict_first")
    async_copy.wait_group(0)


def streamed_softmax_fwd(x: jax.Array, **constants: Any) -> jax.Array | None:
    given, results = {"x_ptr": x}, {"y_ptr": like(x)}
    grid = (constants["PROGRAMS"],)
    return sparse_call(streamed_softmax_kernel, grid, given, results, constants)[0]
