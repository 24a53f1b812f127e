"""Forward kernels of the norms over rows.

    u = x + residual;  xhat = (u - mean(u)) * rstd;  y = xhat * (weight + offset) + bias

With CENTER unset the mean is not subtracted and rstd = 1 / rms(u). Squares are divided
by COUNT, which is D, or 1 where their sum is meant (l2_norm). Every tensor is read
and written once in device memory: a narrow row stays in registers, a long one is read
again from the caches.
"""

import jax
import jax.numpy as jnp

from jaxkern.gpu.dependent_launch import begin_behind_those_ahead
from jaxkern.gpu.device import (
    WARP,
    compute_capability,
    next_power_of_2,
    num_programs,
)
from jaxkern.gpu.triton_call import jit, like, sparse_call, tl
from jaxkern.triton.norm.row_share import own_share, read_share, write_share
from jaxkern.triton.norm.row_tiles import factor, write
from jaxkern.triton.norm.split_rows import (
    await_others,
    begin,
    centred,
    over_cluster,
    split_sizes,
)

NARROW = 1024  # a row up to here stays in registers


# Where an H200 was faster than by the rule, of bfloat16: rows of up to so many columns.
MEASURED_ON = 90  # compute capability
MEASURED = {128: {"ROWS": 32, "num_warps": 8}, 256: {"num_warps": 2}}


def forward_tile(rows: int, d: int, dtype) -> dict:
    """About 16 elements a thread, whole rows."""
    block = next_power_of_2(d)
    together = max(1, min(2048 // block, next_power_of_2(rows)))
    warps = max(together * block // (16 * WARP), 1)
    rule = {"BLOCK": block, "ROWS": together, "WAVES": 0, "num_warps": warps}
    measured = dtype == jnp.bfloat16 and compute_capability() == MEASURED_ON
    return rule | (MEASURED.get(block, {}) if measured else {})


def forward_chunks(d: int, center: bool, with_residual: bool) -> dict:
    """Chunks that a program loads at once: large ones, with little waste for odd d."""
    block = 16384 if d > 65536 else 4096 if d > 2048 else 1024
    warps = block // 512 if d < 8192 else max(16, block // 512)
    if center and d <= 8192:
        block, warps = centered_chunks(d)
    elif 2048 < d < 3072 and not with_residual:
        block, warps = 1024, 4  # a chunk of 4096 would be half empty
    return {"BLOCK": block, "num_warps": warps}


def centered_chunks(d: int) -> tuple[int, int]:
    """(elements, warps) where a mean is subtracted: smaller, as more is computed."""
    if d <= 2048:
        return 512, 2
    if d < 4096:
        return (512, 4) if 0 < d % 1024 <= 512 else (1024, 2)
    return 2048, 4 if d < 8192 else 8


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
    COUNT: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if AHEAD:
        begin_behind_those_ahead()
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < D
    if weight_ptr is not None:
        scale = tl.load(weight_ptr + columns, inside, 0.0).to(tl.float32) + OFFSET
    if bias_ptr is not None:
        shift = tl.load(bias_ptr + columns, inside, 0.0).to(tl.float32)
    num_blocks: tl.constexpr = (NUM_ROWS + ROWS - 1) // ROWS
    for block in range(tl.program_id(0), num_blocks, PROGRAMS):
        rows = block * ROWS + tl.arange(0, ROWS)[:, None]
        at = rows.to(tl.int64) * D + columns  # [ROWS, BLOCK]
        mask = (rows < NUM_ROWS) & inside
        # results leave the cache before operands: a copy of 67 MB is 2 % faster so
        u = tl.load(x_ptr + at, mask, 0.0, eviction_policy="evict_last").to(tl.float32)
        if residual_ptr is not None:
            u += tl.load(residual_ptr + at, mask, 0.0).to(tl.float32)
        if total_ptr is not None:
            tl.store(total_ptr + at, u, mask)
        if CENTER:
            mean = tl.sum(u, 1, keep_dims=True) / D
            u = tl.where(inside, u - mean, 0.0)
            # a sum over a long row far from zero has lost digits: restore them
            rest = tl.sum(u, 1, keep_dims=True) / D
            u = tl.where(inside, u - rest, 0.0)
            if mean_ptr is not None:
                tl.store(mean_ptr + rows, mean + rest, rows < NUM_ROWS)
        rstd = tl.rsqrt(tl.sum(u * u, 1, keep_dims=True) / COUNT + EPS)
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
    COUNT: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTER: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if AHEAD:
        begin_behind_those_ahead()
    columns = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    start = row.to(tl.int64) * D
    squares = tl.zeros([BLOCK], tl.float32)
    if CENTER:
        # each lane adds up what differs from its first element: no digits are lost far
        # from zero, and no division is needed
        sums = tl.zeros([BLOCK], tl.float32)
        at = start + columns
        origin = tl.load(x_ptr + at, columns < D, 0.0, eviction_policy="evict_last")
        origin = origin.to(tl.float32)
        if residual_ptr is not None:
            origin += tl.load(residual_ptr + at, columns < D, 0.0).to(tl.float32)
    for first in range(BLOCK if CENTER else 0, D, BLOCK):
        mask = first + columns < D
        at = start + first + columns
        u = tl.load(x_ptr + at, mask, 0.0, eviction_policy="evict_last").to(tl.float32)
        if residual_ptr is not None:
            u += tl.load(residual_ptr + at, mask, 0.0).to(tl.float32)
        if CENTER:
            change = tl.where(mask, u - origin, 0.0)
            sums += change
            squares += change * change
        else:
            squares += u * u
    mean = 0.0
    if CENTER:
        count = tl.maximum((D - columns + BLOCK - 1) // BLOCK, 0).to(tl.float32)
        shift = sums / tl.maximum(count, 1.0)
        means = origin + shift
        squares -= sums * shift
        mean = tl.sum(count * means, 0) / D
        squares += count * (means - mean) * (means - mean)
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean)
    variance = tl.sum(squares, 0) / COUNT
    rstd = tl.rsqrt(variance + EPS)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd)
    for first in range(0, D, BLOCK):
        mask = first + columns < D
        at = start + first + columns
        u = tl.load(x_ptr + at, mask, 0.0, eviction_policy="evict_first")
        u = u.to(tl.float32)
        if residual_ptr is not None:
            u += tl.load(residual_ptr + at, mask, 0.0).to(tl.float32)
        if total_ptr is not None:
            tl.store(total_ptr + at, u, mask)
        y = (u - mean) * rstd
        if weight_ptr is not None:
            w = tl.load(weight_ptr + first + columns, mask, 0.0).to(tl.float32)
            y = y * (w + OFFSET)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + first + columns, mask, 0.0).to(tl.float32)
        tl.store(y_ptr + at, y, mask, eviction_policy="evict_first")


@jit
def split_row_norm_fwd_kernel(
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
    COUNT: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTER: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    CLUSTER: tl.constexpr,
    EXCHANGE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A row held by the programs of a cluster; all loads stand ahead of the sums."""
    memory = begin(CLUSTER, EXCHANGE)
    if AHEAD:
        begin_behind_those_ahead()
    row, start, columns, at = own_share(D, BLOCK, CLUSTER, VECTOR)
    inside = (columns >= 0) & (columns < D)
    u = read_share(x_ptr, start, columns, at, NUM_ROWS, D, VECTOR)
    if residual_ptr is not None:
        u += read_share(residual_ptr, start, columns, at, NUM_ROWS, D, VECTOR)
    scale = factor(weight_ptr, columns, inside, OFFSET)
    if bias_ptr is not None:
        shift = tl.load(bias_ptr + columns, inside, 0.0).to(tl.float32)
    write_share(total_ptr, start, columns, at, u, D, VECTOR)
    await_others(CLUSTER)
    if CENTER:
        u, mean, squares = centred(u, inside, memory, D, CLUSTER)
        write(mean_ptr, row, mean, row >= 0)
    else:
        squares = over_cluster(tl.sum(u * u, 0), memory, 0, CLUSTER)
    rstd = tl.rsqrt(squares / COUNT + EPS)
    write(rstd_ptr, row, rstd, row >= 0)
    y = u * rstd * scale
    if bias_ptr is not None:
        y += shift
    write_share(y_ptr, start, columns, at, y, D, VECTOR)


def row_norm_fwd(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    eps: float,
    offset: float = 0.0,
    center: bool = False,
    mean_square: bool = True,
    copied: bool = False,
) -> tuple[jax.Array | None, ...]:
    """(y, total, mean, rstd); mean uncentred is None.

    So is total without a residual, unless x is to be `copied` there.
    """
    *lead, d = x.shape
    rows = x.size // d if d else 0
    per_row = jax.ShapeDtypeStruct((*lead, 1), jnp.float32)
    given = {
        "x_ptr": x,
        "residual_ptr": residual,
        "weight_ptr": weight,
        "bias_ptr": bias,
    }
    results = {
        "y_ptr": like(x),
        "total_ptr": like(x) if copied else like(residual),
        "mean_ptr": per_row if center else None,
        "rstd_ptr": per_row,
    }
    count = d if mean_square else 1
    constants = {"D": d, "EPS": eps, "OFFSET": offset, "CENTER": center, "COUNT": count}
    if d <= NARROW:
        sizes = forward_tile(rows, d, x.dtype)
        blocks = -(-rows // sizes["ROWS"])
        programs = num_programs(blocks, sizes.pop("WAVES"))
        sizes |= {"NUM_ROWS": rows, "PROGRAMS": programs}
        grid = (programs,)
        constants |= sizes
        return sparse_call(row_norm_fwd_kernel, grid, given, results, constants)
    if sizes := split_sizes(x):
        kernel, programs = split_row_norm_fwd_kernel, rows * sizes["CLUSTER"]
    else:
        kernel, programs = long_row_norm_fwd_kernel, rows
        sizes = forward_chunks(d, center, residual is not None)
    return sparse_call(kernel, (programs,), given, results, constants | sizes)
