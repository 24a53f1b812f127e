"""RMSNorm of short rows for inference: no warp waits for another.

    y = x / sqrt(mean(x^2) + eps) * (weight + offset)

A few lanes hold a row, and a lane holds 16 bytes of one row: a program is as light as
one that copies, and as many are in flight. Written in Gluon: Triton would have the
weight of 256 columns pass through shared memory, past a barrier of the program.
docs/design/triton_kernels.md has the measurements.
"""

from typing import Any

import jax

from jaxkern.gpu.device import WARP
from jaxkern.gpu.rows import num_rows
from jaxkern.gpu.triton_call import gl, gluon_jit, like, sparse_call

COLUMNS = (64, 128, 256)  # 8, 16 or 32 lanes a row
ELEMENTS = 8  # of a lane: 16 bytes
WARPS = 4


def is_short(x: Any) -> bool:
    return x.dtype.itemsize == 2 and x.shape[-1] in COLUMNS


@gluon_jit
def short_rms_norm_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    NUM_ROWS: gl.constexpr,
    D: gl.constexpr,
    EPS: gl.constexpr,
    OFFSET: gl.constexpr,
    ROWS: gl.constexpr,
    ELEMENTS: gl.constexpr,
):
    LANES: gl.constexpr = D // ELEMENTS
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, ELEMENTS], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0]
    )
    columns = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    rows = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    at = rows.to(gl.int64)[:, None] * D + columns[None, :]
    mask = (rows[:, None] < NUM_ROWS) & (columns[None, :] < D)
    # results leave the cache before operands: a copy of 67 MB is 3 % faster so
    x = gl.load(x_ptr + at, mask, 0.0, eviction_policy="evict_last").to(gl.float32)
    if weight_ptr is not None:
        scale = gl.load(weight_ptr + columns).to(gl.float32) + OFFSET
    rstd = gl.rsqrt(gl.sum(x * x, 1) / D + EPS)
    y = x * rstd[:, None]
    if weight_ptr is not None:
        y = y * scale[None, :]
    y = y.to(y_ptr.dtype.element_ty)
    gl.store(y_ptr + at, y, mask, eviction_policy="evict_first")


def short_rms_norm(
    x: jax.Array, weight: jax.Array | None, *, eps: float, offset: float
) -> jax.Array | None:
    n, d = num_rows(x), x.shape[-1]
    rows = WARPS * WARP * ELEMENTS // d
    [y] = sparse_call(
        short_rms_norm_kernel,
        (-(-n // rows),),
        {"x_ptr": x, "weight_ptr": weight},
        {"y_ptr": like(x)},
        {
            "NUM_ROWS": n,
            "D": d,
            "EPS": eps,
            "OFFSET": offset,
            "ROWS": rows,
            "ELEMENTS": ELEMENTS,
            "num_warps": WARPS,
        },
    )
    return y
