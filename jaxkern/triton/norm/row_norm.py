"""Kernels of the norms over rows: one read and one write of each row.

    u = x + residual;  xhat = (u - mean(u)) * rstd;  y = xhat * (weight + offset) + bias

With CENTER unset the mean is not subtracted and rstd = 1 / rms(u). A row up to LONGEST
elements stays in registers; a longer one is read again, mostly from the L2 cache. Each
program walks over many rows, so that the gradients of weight and bias need one partial
sum a program and the next row loads while this one is worked on.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxkern.triton.block_sizes import block_sizes, num_programs
from jaxkern.triton.triton_call import jit, tl, triton_call

LONGEST = 16384  # elements of a row that stay in registers


@jit
def row_norm_fwd_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    total_ptr,
    mean_ptr,
    rstd_ptr,
    NUM_ROWS: tl.constexpr,
    D: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < D
    if weight_ptr is not None:
        scale = tl.load(weight_ptr + columns, inside, 0.0).to(tl.float32) + OFFSET
    if bias_ptr is not None:
        shift = tl.load(bias_ptr + columns, inside, 0.0).to(tl.float32)
    num_blocks: tl.constexpr = (NUM_ROWS + ROWS - 1) // ROWS
    for block in tl.range(tl.program_id(0), num_blocks, PROGRAMS, num_stages=STAGES):
        rows = block * ROWS + tl.arange(0, ROWS)[:, None]
        at = rows.to(tl.int64) * D + columns  # [ROWS, BLOCK]
        mask = (rows < NUM_ROWS) & inside
        u = tl.load(x_ptr + at, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
        if residual_ptr is not None:
            u += tl.load(residual_ptr + at, mask, 0.0).to(tl.float32)
            tl.store(total_ptr + at, u, mask)
        if CENTER:
            mean = tl.sum(u, 1, keep_dims=True) / D
            u = tl.where(inside, u - mean, 0.0)
            # a sum over a long row far from zero has lost digits: restore them
            rest = tl.sum(u, 1, keep_dims=True) / D
            u = tl.where(inside, u - rest, 0.0)
            if mean_ptr is not None:
                tl.store(mean_ptr + rows, mean + rest, rows < NUM_ROWS)
        rstd = tl.rsqrt(tl.sum(u * u, 1, keep_dims=True) / D + EPS)
        if rstd_ptr is not None:
            tl.store(rstd_ptr + rows, rstd, rows < NUM_ROWS)
        y = u * rstd
        if weight_ptr is not None:
            y = y * scale
        if bias_ptr is not None:
            y = y + shift
        tl.store(y_ptr + at, y, mask, eviction_policy="evict_first")


@jit
def long_row_norm_fwd_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    total_ptr,
    mean_ptr,
    rstd_ptr,
    D: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    start = row.to(tl.int64) * D
    columns = tl.arange(0, BLOCK)
    mean = 0.0
    if CENTER:
        sums = tl.zeros([BLOCK], tl.float32)
        for first in range(0, D, BLOCK):
            mask = first + columns < D
            at = start + first + columns
            u = tl.load(x_ptr + at, mask, 0.0, eviction_policy="evict_last")
            sums += u.to(tl.float32)
            if residual_ptr is not None:
                sums += tl.load(residual_ptr + at, mask, 0.0).to(tl.float32)
        mean = tl.sum(sums, 0) / D
    sums = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, D, BLOCK):
        mask = first + columns < D
        at = start + first + columns
        u = tl.load(x_ptr + at, mask, 0.0, eviction_policy="evict_last").to(tl.float32)
        if residual_ptr is not None:
            u += tl.load(residual_ptr + at, mask, 0.0).to(tl.float32)
        u = tl.where(mask, u - mean, 0.0)
        sums += u
        squares += u * u
    variance = tl.sum(squares, 0) / D
    if CENTER:
        rest = tl.sum(sums, 0) / D
        mean += rest
        variance -= rest * rest
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean)
    rstd = tl.rsqrt(variance + EPS)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd)
    for first in range(0, D, BLOCK):
        mask = first + columns < D
        at = start + first + columns
        u = tl.load(x_ptr + at, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
        if residual_ptr is not None:
            u += tl.load(residual_ptr + at, mask, 0.0).to(tl.float32)
            tl.store(total_ptr + at, u, mask)
        y = (u - mean) * rstd
        if weight_ptr is not None:
            w = tl.load(weight_ptr + first + columns, mask, 0.0).to(tl.float32)
            y = y * (w + OFFSET)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + first + columns, mask, 0.0).to(tl.float32)
        tl.store(y_ptr + at, y, mask, eviction_policy="evict_first")


def row_norm_fwd(
    x: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array | None,
    bias: jax.Array | None,
    *,
    eps: float,
    offset: float,
    center: bool,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array]:
    """(y, total, mean, rstd); total without a residual and mean uncentred are None."""
    *lead, d = x.shape
    rows = x.size // d if d else 0
    per_row = jax.ShapeDtypeStruct((*lead, 1), jnp.float32)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    given = {
        "x_ptr": x,
        "residual_ptr": residual,
        "weight_ptr": weight,
        "bias_ptr": bias,
    }
    results = {
        "y_ptr": like,
        "total_ptr": None if residual is None else like_of(residual),
        "mean_ptr": per_row if center else None,
        "rstd_ptr": per_row,
    }
    constants = {"D": d, "EPS": eps, "OFFSET": offset, "CENTER": center}
    if d <= LONGEST:
        sizes = block_sizes("row_norm_fwd", rows, d, x.dtype)
        out = call(row_norm_fwd_kernel, given, results, constants, rows, sizes)
    else:
        sizes = block_sizes("long_row_norm_fwd", rows, d, x.dtype)
        out = call(long_row_norm_fwd_kernel, given, results, constants, rows, sizes)
    found = by_name(results, out)
    return tuple(found.get(n) for n in results)  # type: ignore[return-value]


def like_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def call(kernel, given: dict, results: dict, constants: dict, rows: int, sizes: dict):
    """Launches a kernel whose absent pointers are the constant None."""
    absent = {n: None for n, x in (given | results).items() if x is None}
    sizes = dict(sizes)
    launch = {n: sizes.pop(n) for n in ("num_warps", "num_stages") if n in sizes}
    if "ROWS" in sizes:
        grid = num_programs(-(-rows // sizes["ROWS"]), sizes.pop("WAVES"))
        constants = constants | {"NUM_ROWS": rows, "PROGRAMS": grid}
    else:
        grid = rows
    return triton_call(
        kernel,
        *(x for x in given.values() if x is not None),
        out=[r for r in results.values() if r is not None],
        grid=(grid,),
        **launch,
        **absent,
        **constants,
        **sizes,
    )


@jit
def row_norm_bwd_kernel(
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
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < D
    if weight_ptr is not None:
        scale = tl.load(weight_ptr + columns, inside, 0.0).to(tl.float32) + OFFSET
    if dweight_ptr is not None:
        dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    if dbias_ptr is not None:
        dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    num_blocks: tl.constexpr = (NUM_ROWS + ROWS - 1) // ROWS
    for block in tl.range(tl.program_id(0), num_blocks, PROGRAMS, num_stages=STAGES):
        rows = block * ROWS + tl.arange(0, ROWS)[:, None]
        at = rows.to(tl.int64) * D + columns  # [ROWS, BLOCK]
        present = rows < NUM_ROWS
        mask = present & inside
        u = tl.load(x_ptr + at, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
        dy = tl.load(dy_ptr + at, mask, 0.0, eviction_policy="evict_first")
        dy = dy.to(tl.float32)
        if residual_ptr is not None:
            u += tl.load(residual_ptr + at, mask, 0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, present, 0.0)
        if mean_ptr is not None:
            u = tl.where(inside, u - tl.load(mean_ptr + rows, present, 0.0), 0.0)
        xhat = u * rstd
        dxhat = dy
        if weight_ptr is not None:
            dxhat = dy * scale
        du = dxhat - xhat * (tl.sum(dxhat * xhat, 1, keep_dims=True) / D)
        if mean_ptr is not None:
            du -= tl.sum(dxhat, 1, keep_dims=True) / D
        du = du * rstd
        if dtotal_ptr is not None:
            du += tl.load(dtotal_ptr + at, mask, 0.0).to(tl.float32)
        if dx_ptr is not None:
            tl.store(dx_ptr + at, du, mask, eviction_policy="evict_first")
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + at, du, mask, eviction_policy="evict_first")
        if dweight_ptr is not None:
            dweight += dy * xhat
        if dbias_ptr is not None:
            dbias += dy
    partial = tl.program_id(0).to(tl.int64) * D + tl.arange(0, BLOCK)
    if dweight_ptr is not None:
        tl.store(dweight_ptr + partial, tl.sum(dweight, 0), tl.arange(0, BLOCK) < D)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, tl.sum(dbias, 0), tl.arange(0, BLOCK) < D)


@jit
def long_row_norm_bwd_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dy_ptr,
    dtotal_ptr,
    dx_ptr,
    dresidual_ptr,
    D: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    start = row.to(tl.int64) * D
    columns = tl.arange(0, BLOCK)
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + row)
    products = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, D, BLOCK):
        mask = first + columns < D
        at = start + first + columns
        u = tl.load(x_ptr + at, mask, 0.0, eviction_policy="evict_last").to(tl.float32)
        dxhat = tl.load(dy_ptr + at, mask, 0.0, eviction_policy="evict_last")
        dxhat = dxhat.to(tl.float32)
        if residual_ptr is not None:
            u += tl.load(residual_ptr + at, mask, 0.0).to(tl.float32)
        if weight_ptr is not None:
            w = tl.load(weight_ptr + first + columns, mask, 0.0).to(tl.float32)
            dxhat *= w + OFFSET
        products += dxhat * (u - mean) * rstd
        sums += dxhat
    along_xhat = tl.sum(products, 0) / D
    along_mean = tl.sum(sums, 0) / D
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
        du = dxhat - (u - mean) * rstd * along_xhat
        if mean_ptr is not None:
            du -= along_mean
        du *= rstd
        if dtotal_ptr is not None:
            du += tl.load(dtotal_ptr + at, mask, 0.0).to(tl.float32)
        if dx_ptr is not None:
            tl.store(dx_ptr + at, du, mask)
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + at, du, mask)


def row_norm_bwd(
    x: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array | None,
    bias: jax.Array | None,
    mean: jax.Array | None,
    rstd: jax.Array,
    dy: jax.Array,
    dtotal: jax.Array | None,
    *,
    offset: float,
    wanted: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    """Gradients of (x, residual, weight, bias); None where absent or not wanted."""
    *_, d = x.shape
    rows = x.size // d if d else 0
    operands = (x, residual, weight, bias)
    dx_, dresidual_, dweight_, dbias_ = (
        w and o is not None for w, o in zip(wanted, operands, strict=True)
    )
    given = {
        "x_ptr": x,
        "residual_ptr": residual,
        "weight_ptr": weight,
        "mean_ptr": mean,
        "rstd_ptr": rstd,
        "dy_ptr": dy,
        "dtotal_ptr": dtotal,
    }
    results = {
        "dx_ptr": like_of(x) if dx_ else None,
        "dresidual_ptr": like_of(residual) if dresidual_ else None,
    }
    constants = {"D": d, "OFFSET": offset}
    if d > LONGEST:
        found = {}
        if dx_ or dresidual_:
            sizes = block_sizes("long_row_norm_bwd", rows, d, x.dtype)
            kernel = long_row_norm_bwd_kernel
            out = call(kernel, given, results, constants, rows, sizes)
            found = by_name(results, out)
        u = x.astype(jnp.float32) + (0 if residual is None else residual)
        xhat = (u if mean is None else u - mean) * rstd
        sums = {
            "dweight_ptr": sum_rows(dy * xhat, weight) if dweight_ else None,
            "dbias_ptr": sum_rows(dy.astype(jnp.float32), bias) if dbias_ else None,
        }
    else:
        sizes = block_sizes("row_norm_bwd", rows, d, x.dtype)
        programs = num_programs(-(-rows // sizes["ROWS"]), sizes["WAVES"])
        partial = jax.ShapeDtypeStruct((programs, d), jnp.float32)
        results |= {
            "dweight_ptr": partial if dweight_ else None,
            "dbias_ptr": partial if dbias_ else None,
        }
        found = by_name(
            results, call(row_norm_bwd_kernel, given, results, constants, rows, sizes)
        )
        sums = {
            "dweight_ptr": sum_rows(found.get("dweight_ptr"), weight),
            "dbias_ptr": sum_rows(found.get("dbias_ptr"), bias),
        }
    return (
        found.get("dx_ptr"),
        found.get("dresidual_ptr"),
        sums["dweight_ptr"],
        sums["dbias_ptr"],
    )


def by_name(results: dict, out: Sequence[jax.Array]) -> dict[str, jax.Array]:
    return dict(zip([n for n, r in results.items() if r is not None], out, strict=True))


def sum_rows(x: jax.Array | None, like: jax.Array | None) -> jax.Array | None:
    if x is None or like is None:
        return None
    return x.sum(range(x.ndim - 1)).astype(like.dtype)
