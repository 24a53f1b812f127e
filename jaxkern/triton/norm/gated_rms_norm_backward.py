"""The backward kernels of the norms beside a gate.

dx needs a mean along the row. A short row lies in registers; a long one is read once
for the mean and again, mostly from the caches, in chunks whose sums for the weight stay
in registers. Where they do not fit, a kernel of its own finds the means, and programs
walk down stripes of columns.
"""
# ruff: noqa: RUF005 - Triton compiles `a + (b,)` but not `(*a, b)`

import jax

from jaxkern.gpu.rows import num_rows
from jaxkern.gpu.triton_call import jit, like, sparse_call, tl
from jaxkern.triton.norm.row_tiles import (
    as_float32,
    backward_sizes,
    factor,
    means_sizes,
    partial_sums,
    per_row,
    prefetch_rows,
    read_each,
    summed,
    write,
)
from jaxkern.triton.norm.split_rows import await_others, begin, mean_of, own_stripe

LONGEST = 8192  # columns of a row that stays in registers
MOST = 16384  # columns of a row of which the sums for the vectors stay there


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
def products_along(
    ptrs,
    weight_ptr,
    start,
    present,
    rstd,
    D: tl.constexpr,
    OFFSET: tl.constexpr,
    SILU: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dxhat xhat of rows, added up over chunks, [ROWS, BLOCK]."""
    products = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(0, D, BLOCK, loop_unroll_factor=2):
        columns = first + tl.arange(0, BLOCK)[None, :]
        inside = columns < D
        tiles = read_each(ptrs, 3, start + columns, present & inside, True)
        x, z, dy = as_float32(tiles)
        xhat, dnormed, _, _ = opened_and_normed(x, z, dy, rstd, SILU, NORM_FIRST)
        products += dnormed * factor(weight_ptr, columns, inside, OFFSET) * xhat
    return products


@jit
def gated_norm_means_kernel(
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
    row = tl.program_id(0) + tl.zeros([1, 1], tl.int32)
    products = products_along(
        (x_ptr, gate_ptr, dy_ptr),
        weight_ptr,
        row.to(tl.int64) * D,
        row >= 0,
        tl.load(rstd_ptr + row),
        D,
        OFFSET,
        SILU,
        NORM_FIRST,
        1,
        BLOCK,
    )
    tl.store(along_ptr + row, tl.sum(products, 1, keep_dims=True) / D)


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
    CHUNKS: tl.constexpr,
    PREFETCH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
    CLUSTER: tl.constexpr,
    EXCHANGE: tl.constexpr,
):
    memory = begin(CLUSTER, EXCHANGE)
    ptrs = (x_ptr, gate_ptr, dy_ptr)
    lanes = own_stripe(CLUSTER) * BLOCK + tl.arange(0, BLOCK)[None, :]
    dweight = ()
    for _ in tl.static_range(CHUNKS):
        dweight = dweight + (tl.zeros([ROWS, BLOCK], tl.float32),)
    await_others(CLUSTER)
    program = tl.program_id(0) // CLUSTER
    num_blocks: tl.constexpr = (NUM_ROWS + ROWS - 1) // ROWS
    for block in tl.range(program, num_blocks, PROGRAMS, num_stages=STAGES):
        rows = block * ROWS + tl.arange(0, ROWS)[:, None]
        present = rows < NUM_ROWS
        start = rows.to(tl.int64) * D
        rstd = tl.load(rstd_ptr + rows, present, 0.0)
        if CHUNKS > 1:
            products = products_along(
                ptrs,
                weight_ptr,
                start,
                present,
                rstd,
                D,
                OFFSET,
                SILU,
                NORM_FIRST,
                ROWS,
                BLOCK,
            )
        tiles = read_each(ptrs, 3, start + lanes, present & (lanes < D), False)
        if PREFETCH:
            further = tl.minimum(block + PROGRAMS, NUM_ROWS - 1)
            prefetch_rows(ptrs, 3, further.to(tl.int64), D)
        if CHUNKS > 1:
            along = tl.sum(products, 1, keep_dims=True) / D
        elif along_ptr is not None:
            along = tl.load(along_ptr + rows, present, 0.0)
        sums = ()
        for k in tl.static_range(CHUNKS):
            columns = k * BLOCK + lanes
            inside = columns < D
            mask = present & inside
            at = start + columns  # [ROWS, BLOCK]
            x, z, dy = as_float32(tiles)
            if k + 1 < CHUNKS:
                # ahead of the stores, which loads behind them would wait for
                ahead = columns + BLOCK
                tiles = read_each(ptrs, 3, start + ahead, present & (ahead < D), False)
            xhat, dnormed, gate, slope = opened_and_normed(
                x, z, dy, rstd, SILU, NORM_FIRST
            )
            # read each time: held over the loop it would cost registers
            scale = factor(weight_ptr, columns, inside, OFFSET)
            dxhat = dnormed * scale
            if along_ptr is None and CHUNKS == 1:
                place = block // PROGRAMS % 2
                along = mean_of(dxhat * xhat, memory, place, D, CLUSTER)
            du = (dxhat - xhat * along) * rstd
            sums = sums + (dweight[k] + dnormed * xhat,)
            if NORM_FIRST:
                write(dx_ptr, at, du, mask)
                dgate = dy * xhat * scale
            else:
                write(dx_ptr, at, du * gate, mask)
                dgate = du * x
            write(dgate_ptr, at, dgate * slope, mask)
        dweight = sums
    start = program.to(tl.int64) * D
    for k in tl.static_range(CHUNKS):
        columns = k * BLOCK + lanes
        total = tl.sum(dweight[k], 0, keep_dims=True)
        write(dweight_ptr, start + columns, total, columns < D)


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
    options = {"OFFSET": offset, "SILU": silu, "NORM_FIRST": norm_first}
    given = {
        "x_ptr": x,
        "gate_ptr": gate,
        "weight_ptr": weight,
        "rstd_ptr": rstd,
        "dy_ptr": dy,
    }
    sizes, stripes = backward_sizes(
        x,
        streams=4,
        sums=1,
        elements=LONGEST,
        longest=LONGEST,
        most=MOST,
    )
    along = None
    if stripes > 1:
        [along] = sparse_call(
            gated_norm_means_kernel,
            (num_rows(x),),
            given,
            {"along_ptr": per_row(x)},
            means_sizes(x) | options,
        )
    partial = partial_sums(sizes["PROGRAMS"], x.shape[-1], weight)
    results = [like(x), like(gate), partial]
    names = ("dx_ptr", "dgate_ptr", "dweight_ptr")
    dx, dgate, dweight = sparse_call(
        gated_norm_bwd_kernel,
        (sizes["PROGRAMS"] * sizes["CLUSTER"], stripes),
        given | {"along_ptr": along},
        {n: r if w else None for n, r, w in zip(names, results, wanted, strict=True)},
        sizes | options,
    )
    return dx, dgate, summed(dweight, weight)
