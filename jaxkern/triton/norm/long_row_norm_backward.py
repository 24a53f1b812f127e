"""Backward kernels of the norms over rows that do not fit in registers.

Up to CHUNKED columns the sums for weight and bias stay there, and each row is read
twice. Beyond, a kernel of its own finds the means over each row, and another walks down
stripes of columns.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import next_power_of_2, num_sms
from jaxkern.gpu.triton_call import jit, sparse_call, tl

CHUNKED = 16384  # up to here the sums stay in registers; beyond, two kernels


def backward_chunks(d: int) -> dict:
    sizes = {"BLOCK": 4096, "WAVES": 1, "num_warps": 16}
    return sizes | {"CHUNKS": next_power_of_2(-(-d // sizes["BLOCK"]))}


@jit
def statistics(rstd_ptr, mean_ptr, row):
    """(rstd, mean) of a row; 0 for the mean of a norm that has none."""
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + row)
    return rstd, mean


@jit
def write(du, dtotal_ptr, dx_ptr, dresidual_ptr, at, mask):
    """Gradients of x and of what was added to it: du, and that of their sum."""
    if dtotal_ptr is not None:
        du += tl.load(dtotal_ptr + at, mask, 0.0).to(tl.float32)
    if dx_ptr is not None:
        tl.store(dx_ptr + at, du, mask)
    if dresidual_ptr is not None:
        tl.store(dresidual_ptr + at, du, mask)


@jit
def chunked_row_norm_bwd_kernel(
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
    NUM_ROWS: tl.constexpr,
    D: tl.constexpr,
    COUNT: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Rows that do not fit in registers beside their sums: each is read twice."""
    columns = tl.arange(0, BLOCK)
    which = tl.arange(0, CHUNKS)[:, None]
    if dweight_ptr is not None:
        dweight = tl.zeros([CHUNKS, BLOCK], tl.float32)
    if dbias_ptr is not None:
        dbias = tl.zeros([CHUNKS, BLOCK], tl.float32)
    for row in tl.range(tl.program_id(0), NUM_ROWS, PROGRAMS):
        start = row.to(tl.int64) * D
        rstd, mean = statistics(rstd_ptr, mean_ptr, row)
        products = tl.zeros([BLOCK], tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        for k in tl.static_range(CHUNKS):
            mask = k * BLOCK + columns < D
            at = start + k * BLOCK + columns
            u = tl.load(x_ptr + at, mask, 0.0).to(tl.float32)
            dxhat = tl.load(dy_ptr + at, mask, 0.0).to(tl.float32)
            if residual_ptr is not None:
                u += tl.load(residual_ptr + at, mask, 0.0).to(tl.float32)
            if weight_ptr is not None:
                w = tl.load(weight_ptr + k * BLOCK + columns, mask, 0.0)
                dxhat *= w.to(tl.float32) + OFFSET
            products += dxhat * (u - mean)
            sums += dxhat
        along_xhat = tl.sum(products, 0) * rstd / COUNT
        along_mean = tl.sum(sums, 0) / D
        for k in tl.static_range(CHUNKS):
            mask = k * BLOCK + columns < D
            at = start + k * BLOCK + columns
            u = tl.load(x_ptr + at, mask, 0.0).to(tl.float32)
            dy = tl.load(dy_ptr + at, mask, 0.0).to(tl.float32)
            if residual_ptr is not None:
                u += tl.load(residual_ptr + at, mask, 0.0).to(tl.float32)
            xhat = (u - mean) * rstd
            du = dy
            if weight_ptr is not None:
                w = tl.load(weight_ptr + k * BLOCK + columns, mask, 0.0)
                du = dy * (w.to(tl.float32) + OFFSET)
            du -= xhat * along_xhat
            if mean_ptr is not None:
                du -= along_mean
            write(du * rstd, dtotal_ptr, dx_ptr, dresidual_ptr, at, mask)
            # the compiler resolves `which`: each chunk adds to registers of its own
            if dweight_ptr is not None:
                dweight += tl.where(which == k, (dy * xhat)[None, :], 0.0)
            if dbias_ptr is not None:
                dbias += tl.where(which == k, dy[None, :], 0.0)
    column = which * BLOCK + columns[None, :]
    partial = tl.program_id(0).to(tl.int64) * D + column
    if dweight_ptr is not None:
        tl.store(dweight_ptr + partial, dweight, column < D)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, dbias, column < D)


@jit
def row_norm_means_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dy_ptr,
    along_xhat_ptr,
    along_mean_ptr,
    D: tl.constexpr,
    COUNT: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The means over a row that dx needs: of dxhat * xhat, and of dxhat."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * D
    columns = tl.arange(0, BLOCK)
    rstd, mean = statistics(rstd_ptr, mean_ptr, row)
    products = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, D, BLOCK):
        mask = first + columns < D
        at = start + first + columns
        u = tl.load(x_ptr + at, mask, 0.0).to(tl.float32)
        dxhat = tl.load(dy_ptr + at, mask, 0.0).to(tl.float32)
        if residual_ptr is not None:
            u += tl.load(residual_ptr + at, mask, 0.0).to(tl.float32)
        if weight_ptr is not None:
            w = tl.load(weight_ptr + first + columns, mask, 0.0).to(tl.float32)
            dxhat *= w + OFFSET
        products += dxhat * (u - mean)
        sums += dxhat
    tl.store(along_xhat_ptr + row, tl.sum(products, 0) * rstd / COUNT)
    if along_mean_ptr is not None:
        tl.store(along_mean_ptr + row, tl.sum(sums, 0) / D)


@jit
def column_norm_bwd_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dy_ptr,
    dtotal_ptr,
    along_xhat_ptr,
    along_mean_ptr,
    dx_ptr,
    dresidual_ptr,
    dweight_ptr,
    dbias_ptr,
    NUM_ROWS: tl.constexpr,
    D: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Gradients of a stripe of columns, once the means over rows are known."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = columns < D
    if weight_ptr is not None:
        scale = tl.load(weight_ptr + columns, inside, 0.0).to(tl.float32) + OFFSET
    if dweight_ptr is not None:
        dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    if dbias_ptr is not None:
        dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    num_blocks: tl.constexpr = (NUM_ROWS + ROWS - 1) // ROWS
    for block in range(tl.program_id(1), num_blocks, PARTS):
        rows = block * ROWS + tl.arange(0, ROWS)[:, None]
        at = rows.to(tl.int64) * D + columns  # [ROWS, BLOCK]
        present = rows < NUM_ROWS
        mask = present & inside
        u = tl.load(x_ptr + at, mask, 0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask, 0.0).to(tl.float32)
        if residual_ptr is not None:
            u += tl.load(residual_ptr + at, mask, 0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, present, 0.0)
        if mean_ptr is not None:
            u -= tl.load(mean_ptr + rows, present, 0.0)
        xhat = u * rstd
        du = dy
        if weight_ptr is not None:
            du = dy * scale
        du -= xhat * tl.load(along_xhat_ptr + rows, present, 0.0)
        if along_mean_ptr is not None:
            du -= tl.load(along_mean_ptr + rows, present, 0.0)
        write(du * rstd, dtotal_ptr, dx_ptr, dresidual_ptr, at, mask)
        if dweight_ptr is not None:
            dweight += dy * xhat
        if dbias_ptr is not None:
            dbias += dy
    stripe = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    partial = tl.program_id(1).to(tl.int64) * D + stripe
    if dweight_ptr is not None:
        tl.store(dweight_ptr + partial, tl.sum(dweight, 0), stripe < D)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, tl.sum(dbias, 0), stripe < D)


def long_row_norm_bwd(
    given: dict, results: Callable, constants: dict, rows: int, d: int
) -> tuple[jax.Array | None, ...]:
    """Two passes: the means over each row, then stripes of columns."""
    per_row = jax.ShapeDtypeStruct(given["rstd_ptr"].shape, jnp.float32)
    means = {
        "along_xhat_ptr": per_row,
        "along_mean_ptr": None if given["mean_ptr"] is None else per_row,
    }
    read = {n: x for n, x in given.items() if n != "dtotal_ptr"}
    sizes = {"BLOCK": 8192, "num_warps": 16}
    found = sparse_call(row_norm_means_kernel, (rows,), read, means, constants | sizes)
    given = given | dict(zip(means, found, strict=True))
    constants = {n: c for n, c in constants.items() if n != "COUNT"}  # is in the means
    sizes = {"BLOCK": 1024, "ROWS": 2, "NUM_ROWS": rows, "num_warps": 4}
    stripes = -(-d // sizes["BLOCK"])
    parts = max(1, min(4 * num_sms() // stripes, -(-rows // sizes["ROWS"])))
    return sparse_call(
        column_norm_bwd_kernel,
        (stripes, parts),
        given,
        results(parts),
        constants | sizes | {"PARTS": parts},
    )
