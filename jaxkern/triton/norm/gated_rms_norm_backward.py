"""Backward kernels of the norms beside a gate: short rows, long ones, any.

Rows up to TILED columns stay in registers. Up to CHUNKED the sums for the weight do, and
each row is read twice. Beyond, a kernel of its own finds the mean along each row that dx
needs, and that of short rows walks down stripes of columns.
"""

import jax
import jax.numpy as jnp

from jaxkern.triton.norm.row_tiles import (
    backward_chunks,
    backward_stripes,
    backward_tile,
    factor,
    means_tile,
    num_rows,
    per_row,
    read,
    read_and_keep,
    summed,
    write,
)
from jaxkern.triton.triton_call import jit, like, sparse_call, tl

TILED = 8192
CHUNKED = 16384


@jit
def opened_and_normed(x, z, dy, rstd, SILU: tl.constexpr, NORM_FIRST: tl.constexpr):
    """xhat, the gradient of what the weight gives, the open gate and its slope."""
    gate = z
    slope = 1.0
    if SILU:
        s = 1.0 / (1.0 + tl.exp(-z))
        gate = z * s
        slope = s * (1.0 + z * (1.0 - s))
    if NORM_FIRST:
        return x * rstd, dy * gate, gate, slope
    else:
        return x * gate * rstd, dy, gate, slope


@jit
def gated_along(
    x_ptr,
    gate_ptr,
    weight_ptr,
    dy_ptr,
    row,
    rstd,
    D: tl.constexpr,
    OFFSET: tl.constexpr,
    SILU: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The mean of dxhat xhat over a row."""
    products = tl.zeros([BLOCK], tl.float32)
    for first in range(0, D, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < D
        at = row * D + columns
        x = read_and_keep(x_ptr, at, inside)
        z = read_and_keep(gate_ptr, at, inside)
        dy = read_and_keep(dy_ptr, at, inside)
        xhat, dnormed, _, _ = opened_and_normed(x, z, dy, rstd, SILU, NORM_FIRST)
        products += dnormed * factor(weight_ptr, columns, inside, OFFSET) * xhat
    return tl.sum(products, 0) / D


@jit
def gated_norm_along_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    rstd_ptr,
    dy_ptr,
    along_ptr,
    D: tl.constexpr,
    OFFSET: tl.constexpr,
    SILU: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    along = gated_along(
        x_ptr,
        gate_ptr,
        weight_ptr,
        dy_ptr,
        row,
        rstd,
        D,
        OFFSET,
        SILU,
        NORM_FIRST,
        BLOCK,
    )
    tl.store(along_ptr + row, along)


@jit
def gated_norm_bwd_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    rstd_ptr,
    dy_ptr,
    along_ptr,
    dx_ptr,
    dgate_ptr,
    dweight_ptr,
    NUM_ROWS: tl.constexpr,
    D: tl.constexpr,
    OFFSET: tl.constexpr,
    SILU: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Whole rows, or a stripe of them where the means along them are given."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = columns < D
    if dweight_ptr is not None:
        dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    num_blocks: tl.constexpr = (NUM_ROWS + ROWS - 1) // ROWS
    for block in tl.range(tl.program_id(0), num_blocks, PROGRAMS, num_stages=STAGES):
        rows = block * ROWS + tl.arange(0, ROWS)[:, None]
        present = rows < NUM_ROWS
        mask = present & inside
        at = rows.to(tl.int64) * D + columns  # [ROWS, BLOCK]
        x = read(x_ptr, at, mask)
        z = read(gate_ptr, at, mask)
        dy = read(dy_ptr, at, mask)
        rstd = tl.load(rstd_ptr + rows, present, 0.0)
        # read each time: held over the loop it would cost registers
        scale = factor(weight_ptr, columns, inside, OFFSET)
        xhat, dnormed, gate, slope = opened_and_normed(
            x, z, dy, rstd, SILU, NORM_FIRST
        )
        if along_ptr is None:
            along = tl.sum(dnormed * scale * xhat, 1, keep_dims=True) / D
        else:
            along = tl.load(along_ptr + rows, present, 0.0)
        if dweight_ptr is not None:
            dweight += dnormed * xhat
        du = (dnormed * scale - xhat * along) * rstd
        if NORM_FIRST:
            write(dx_ptr, at, du, mask)
            write(dgate_ptr, at, dy * xhat * scale * slope, mask)
        else:
            write(dx_ptr, at, du * gate, mask)
            write(dgate_ptr, at, du * x * slope, mask)
    if dweight_ptr is not None:
        at = tl.program_id(0).to(tl.int64) * D + columns
        tl.store(dweight_ptr + at, tl.sum(dweight, 0, keep_dims=True), inside)


@jit
def chunked_gated_norm_bwd_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    rstd_ptr,
    dy_ptr,
    dx_ptr,
    dgate_ptr,
    dweight_ptr,
    NUM_ROWS: tl.constexpr,
    D: tl.constexpr,
    OFFSET: tl.constexpr,
    SILU: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    CHUNKS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    dweight = ()
    for _ in tl.static_range(CHUNKS):
        dweight = dweight + (tl.zeros([BLOCK], tl.float32),)
    for index in tl.range(tl.program_id(0), NUM_ROWS, PROGRAMS):
        row = tl.cast(index, tl.int64)
        rstd = tl.load(rstd_ptr + row)
        along = gated_along(
            x_ptr,
            gate_ptr,
            weight_ptr,
            dy_ptr,
            row,
            rstd,
            D,
            OFFSET,
            SILU,
            NORM_FIRST,
            BLOCK,
        )
        sums = ()
        for k in tl.static_range(CHUNKS):
            columns = k * BLOCK + tl.arange(0, BLOCK)
            mask = columns < D
            at = row * D + columns
            x = read(x_ptr, at, mask)
            z = read(gate_ptr, at, mask)
            dy = read(dy_ptr, at, mask)
            scale = factor(weight_ptr, columns, mask, OFFSET)
            xhat, dnormed, gate, slope = opened_and_normed(
                x, z, dy, rstd, SILU, NORM_FIRST
            )
            sums = sums + (dweight[k] + dnormed * xhat,)
            du = (dnormed * scale - xhat * along) * rstd
            if NORM_FIRST:
                write(dx_ptr, at, du, mask)
                write(dgate_ptr, at, dy * xhat * scale * slope, mask)
            else:
                write(dx_ptr, at, du * gate, mask)
                write(dgate_ptr, at, du * x * slope, mask)
        dweight = sums
    for k in tl.static_range(CHUNKS):
        columns = k * BLOCK + tl.arange(0, BLOCK)
        at = tl.program_id(0).to(tl.int64) * D + columns
        write(dweight_ptr, at, dweight[k], columns < D)


def gated_norm_bwd(
    x: jax.Array,
    gate: jax.Array,
    weight: jax.Array | None,
    rstd: jax.Array,
    dy: jax.Array,
    *,
    offset: float,
    silu: bool,
    norm_first: bool,
    wanted: tuple[bool, bool, bool],
) -> tuple[jax.Array | None, ...]:
    d = x.shape[-1]
    options = {"OFFSET": offset, "SILU": silu, "NORM_FIRST": norm_first}
    given = {
        "x_ptr": x,
        "gate_ptr": gate,
        "weight_ptr": weight,
        "rstd_ptr": rstd,
        "dy_ptr": dy,
    }
    kernel, stripes = gated_norm_bwd_kernel, 1
    if d <= TILED:
        stages = 3 if 2 * d <= TILED else 2
        sizes = backward_tile("gated_norm_bwd", x, 4, TILED, stages)
        given["along_ptr"] = None
    elif d <= CHUNKED:
        kernel = chunked_gated_norm_bwd_kernel
        sizes = backward_chunks("chunked_gated_norm_bwd", x)
    else:
        sizes = backward_stripes("gated_norm_bwd_stripes", x)
        stripes = -(-d // sizes["BLOCK"])
        [given["along_ptr"]] = sparse_call(
            gated_norm_along_kernel,
            (num_rows(x),),
            given,
            {"along_ptr": per_row(x)},
            means_tile("gated_norm_along", x) | options,
        )
    partial = jax.ShapeDtypeStruct((sizes["PROGRAMS"], d), jnp.float32)
    results = {
        "dx_ptr": like(x),
        "dgate_ptr": like(gate),
        "dweight_ptr": None if weight is None else partial,
    }
    dx, dgate, dweight = sparse_call(
        kernel,
        (sizes["PROGRAMS"], stripes),
        given,
        {
            n: r if w else None
            for (n, r), w in zip(results.items(), wanted, strict=True)
        },
        sizes | options,
    )
    return dx, dgate, summed(dweight, weight)
