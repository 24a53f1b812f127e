"""Kernels of the norms over rows.

    u = x + residual;  xhat = (u - mean(u)) * rstd;  y = xhat * (weight + offset) + bias

With CENTER unset the mean is not subtracted and rstd = 1 / rms(u). Squares are divided
by COUNT, which is D, or 1 where their sum is meant (l2_norm). Every tensor is read
and written once in device memory: a narrow row stays in registers, a long one is read
again from the caches. Backward programs walk over many rows, so that the gradients of
weight and bias cost one partial sum a program.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxkern.triton.block_sizes import (
    WARP,
    next_power_of_2,
    num_programs,
    num_sms,
    tuned,
)
from jaxkern.triton.norm.streamed_rows import stream_sizes, streamed_row_norm_bwd
from jaxkern.triton.triton_call import (
    jit,
    like,
    max_shared_bytes,
    sparse_call,
    tl,
)

NARROW = 1024  # a row up to here stays in registers, forward
CENTERED = 4096  # also where the mean is subtracted, which takes two passes
LONGEST = 8192  # and backward, beside its share of dweight
CHUNKED = 16384  # up to here dweight alone stays there; beyond, two kernels


def forward_tile(rows: int, d: int, dtype) -> dict:
    """About 16 elements a thread, whole rows."""
    block = next_power_of_2(d)
    together = max(1, min(2048 // block, next_power_of_2(rows)))
    warps = max(together * block // (16 * WARP), 1)
    rule = {"BLOCK": block, "ROWS": together, "WAVES": 0, "num_warps": warps}
    return tuned("row_norm_fwd", d, dtype, rule)


def forward_chunks(d: int, dtype) -> dict:
    """Chunks that a program loads at once: large ones, with little waste for odd d."""
    block = 16384 if d > 65536 else 4096 if d > 2048 else 1024
    warps = block // 512 if d < 8192 else max(16, block // 512)
    return tuned("long_row_norm_fwd", d, dtype, {"BLOCK": block, "num_warps": warps})


def backward_tile(rows: int, d: int, dtype, num_streams: int) -> dict:
    """Two more tiles load while one is worked on, where they fit in shared memory."""
    block = next_power_of_2(d)
    # (elements of a tile, warps, programs of a multiprocessor), as measured on an H200
    elements, warps, waves = (
        (8192, 8, 1)
        if d <= 256
        else (2048, 4, 3)
        if d <= 1024
        else (4096, 8, 2)
        if d <= 2048
        else (LONGEST, 16, 1)
    )
    together = max(1, min(elements // block, next_power_of_2(rows)))
    tile_bytes = together * block * jnp.dtype(dtype).itemsize * num_streams
    rule = {
        "BLOCK": block,
        "ROWS": together,
        "WAVES": waves,
        "STAGES": 3 if 3.2 * tile_bytes <= max_shared_bytes() else 1,
        "num_warps": min(warps, max(1, together * block // 256)),
    }
    return tuned("row_norm_bwd", d, dtype, rule)


def backward_chunks(d: int, dtype) -> dict:
    rule = {"BLOCK": 4096, "WAVES": 1, "num_warps": 16}
    sizes = tuned("chunked_row_norm_bwd", d, dtype, rule)
    return sizes | {"CHUNKS": next_power_of_2(-(-d // sizes["BLOCK"]))}


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
):
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
):
    columns = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    start = row.to(tl.int64) * D
    # each lane keeps mean and sum of squares of its own columns (Welford 1962)
    count = tl.zeros([BLOCK], tl.float32)
    means = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, D, BLOCK):
        mask = first + columns < D
        at = start + first + columns
        u = tl.load(x_ptr + at, mask, 0.0, eviction_policy="evict_last").to(tl.float32)
        if residual_ptr is not None:
            u += tl.load(residual_ptr + at, mask, 0.0).to(tl.float32)
        if CENTER:
            count += tl.where(mask, 1.0, 0.0)
            change = tl.where(mask, u - means, 0.0)
            means += change / tl.maximum(count, 1.0)
            squares += change * tl.where(mask, u - means, 0.0)
        else:
            squares += u * u
    mean = 0.0
    if CENTER:
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
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    eps: float,
    offset: float = 0.0,
    center: bool = False,
    mean_square: bool = True,
) -> tuple[jax.Array | None, ...]:
    """(y, total, mean, rstd); total without a residual and mean uncentred are None."""
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
        "total_ptr": like(residual),
        "mean_ptr": per_row if center else None,
        "rstd_ptr": per_row,
    }
    count = d if mean_square else 1
    constants = {"D": d, "EPS": eps, "OFFSET": offset, "CENTER": center, "COUNT": count}
    if d <= (CENTERED if center else NARROW):
        sizes = forward_tile(rows, d, x.dtype)
        blocks = -(-rows // sizes["ROWS"])
        programs = num_programs(blocks, sizes.pop("WAVES"))
        sizes |= {"NUM_ROWS": rows, "PROGRAMS": programs}
        grid = (programs,)
        constants |= sizes
        return sparse_call(row_norm_fwd_kernel, grid, given, results, constants)
    sizes = forward_chunks(d, x.dtype)
    return sparse_call(
        long_row_norm_fwd_kernel, (rows,), given, results, constants | sizes
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
    COUNT: tl.constexpr,
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
        du = dxhat - xhat * (tl.sum(dxhat * xhat, 1, keep_dims=True) / COUNT)
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
        rstd = tl.load(rstd_ptr + row)
        mean = 0.0
        if mean_ptr is not None:
            mean = tl.load(mean_ptr + row)
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
            du *= rstd
            if dtotal_ptr is not None:
                du += tl.load(dtotal_ptr + at, mask, 0.0).to(tl.float32)
            if dx_ptr is not None:
                tl.store(dx_ptr + at, du, mask)
            if dresidual_ptr is not None:
                tl.store(dresidual_ptr + at, du, mask)
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
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + row)
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
        du *= rstd
        if dtotal_ptr is not None:
            du += tl.load(dtotal_ptr + at, mask, 0.0).to(tl.float32)
        if dx_ptr is not None:
            tl.store(dx_ptr + at, du, mask)
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + at, du, mask)
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


def row_norm_bwd(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    rstd: jax.Array,
    dy: jax.Array,
    residual: jax.Array | None = None,
    mean: jax.Array | None = None,
    dtotal: jax.Array | None = None,
    offset: float = 0.0,
    wanted: Sequence[bool] = (True, False, False, False),
    mean_square: bool = True,
) -> tuple[jax.Array | None, ...]:
    """Gradients of (x, residual, weight, bias); None where absent or not wanted."""
    *_, d = x.shape
    rows = x.size // d if d else 0
    operands = (x, residual, weight, bias)
    targets = [o if w else None for o, w in zip(operands, wanted, strict=True)]
    given = {
        "x_ptr": x,
        "residual_ptr": residual,
        "weight_ptr": weight,
        "mean_ptr": mean,
        "rstd_ptr": rstd,
        "dy_ptr": dy,
        "dtotal_ptr": dtotal,
    }
    constants = {"D": d, "OFFSET": offset, "COUNT": d if mean_square else 1}

    def results(parts: int) -> dict:
        partial = jax.ShapeDtypeStruct((parts, d), jnp.float32)
        return {
            "dx_ptr": like(targets[0]),
            "dresidual_ptr": like(targets[1]),
            "dweight_ptr": None if targets[2] is None else partial,
            "dbias_ptr": None if targets[3] is None else partial,
        }

    plain = all(o is None for o in (residual, mean, dtotal, targets[3]))
    if plain and (streamed := stream_sizes(x, weight)):
        dx, dweight = streamed_row_norm_bwd(given, results, constants | streamed)
        out = dx, None, dweight, None
    elif d > CHUNKED:
        out = long_row_norm_bwd(given, results, constants, rows, d)
    else:
        kernel = row_norm_bwd_kernel if d <= LONGEST else chunked_row_norm_bwd_kernel
        if d <= LONGEST:
            streams = 2 + (residual is not None) + (dtotal is not None)
            sizes = backward_tile(rows, d, x.dtype, streams)
        else:
            sizes = backward_chunks(d, x.dtype)
        blocks = -(-rows // sizes.get("ROWS", 1))
        programs = num_programs(blocks, sizes.pop("WAVES"))
        sizes |= {"NUM_ROWS": rows, "PROGRAMS": programs}
        out = sparse_call(
            kernel, (programs,), given, results(programs), constants | sizes
        )
    dx, dresidual, *partial = out
    sums = [
        None if p is None or o is None else p.sum(0).astype(o.dtype)
        for p, o in zip(partial, (weight, bias), strict=True)
    ]
    return dx, dresidual, *sums


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
