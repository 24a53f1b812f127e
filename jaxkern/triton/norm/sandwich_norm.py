"""The kernels of two norms with a sum between them; either half may be absent.

    total = (residual + x / rms(x) * (weight + offset)) * scale
    y_i   = total / rms(total) * (next_weight_i + offset)               i = 1 ... 3

rms_norm_add is the first line, multi_rms_norm the second with x for the total, and
sandwich_rms_norm both. From memory each tensor is read once and each result written
once: a program sees its rows two or three times, then mostly in the caches.
"""

from collections.abc import Sequence

import jax

from jaxkern.gpu.dependent_launch import begin_behind_those_ahead
from jaxkern.gpu.rows import num_rows
from jaxkern.gpu.triton_call import jit, like, sparse_call, tl
from jaxkern.triton.norm.row_share import own_share, read_share, write_share
from jaxkern.triton.norm.row_tiles import (
    factor,
    forward_tile,
    per_row,
    read,
    read_and_keep,
    read_scale,
    write,
)
from jaxkern.triton.norm.split_rows import (
    await_others,
    begin,
    split_rstd,
    split_sizes,
)


@jit
def sandwich_norm_fwd_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    scale_ptr,
    next1_ptr,
    next2_ptr,
    next3_ptr,
    y1_ptr,
    y2_ptr,
    y3_ptr,
    total_ptr,
    rstd_ptr,
    next_rstd_ptr,
    NUM_ROWS: tl.constexpr,
    D: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if AHEAD:
        begin_behind_those_ahead()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    present = rows < NUM_ROWS
    start = rows.to(tl.int64) * D
    if residual_ptr is not None:
        squares = tl.zeros([ROWS, BLOCK], tl.float32)
        for first in range(0, D, BLOCK):
            columns = first + tl.arange(0, BLOCK)[None, :]
            mask = present & (columns < D)
            x = read_and_keep(x_ptr, start + columns, mask)
            squares += x * x
        rstd = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / D + EPS)
        tl.store(rstd_ptr + rows, rstd, present)
    if next_rstd_ptr is not None:
        squares = tl.zeros([ROWS, BLOCK], tl.float32)
        for first in range(0, D, BLOCK):
            columns = first + tl.arange(0, BLOCK)[None, :]
            mask = present & (columns < D)
            total = read_and_keep(x_ptr, start + columns, mask)
            if residual_ptr is not None:
                weight = factor(weight_ptr, columns, columns < D, OFFSET)
                residual = read_and_keep(residual_ptr, start + columns, mask)
                # rounded as the backward pass rounds it: next_rstd is of this total
                total = residual + total * rstd * weight
            squares += total * total
        next_rstd = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / D + EPS)
        tl.store(next_rstd_ptr + rows, next_rstd, present)
    for first in range(0, D, BLOCK):
        columns = first + tl.arange(0, BLOCK)[None, :]
        inside = columns < D
        mask = present & inside
        at = start + columns
        total = read(x_ptr, at, mask)
        if residual_ptr is not None:
            weight = factor(weight_ptr, columns, inside, OFFSET)
            total = read(residual_ptr, at, mask) + total * rstd * weight
            total *= read_scale(scale_ptr, columns, inside, SCALE_STRIDE)
            write(total_ptr, at, total, mask)
        if next_rstd_ptr is not None:
            total *= next_rstd
            y = total * factor(next1_ptr, columns, inside, OFFSET)
            write(y1_ptr, at, y, mask)
            if y2_ptr is not None:
                y = total * factor(next2_ptr, columns, inside, OFFSET)
                write(y2_ptr, at, y, mask)
            if y3_ptr is not None:
                y = total * factor(next3_ptr, columns, inside, OFFSET)
                write(y3_ptr, at, y, mask)


@jit
def split_sandwich_norm_fwd_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    scale_ptr,
    next1_ptr,
    next2_ptr,
    next3_ptr,
    y1_ptr,
    y2_ptr,
    y3_ptr,
    total_ptr,
    rstd_ptr,
    next_rstd_ptr,
    NUM_ROWS: tl.constexpr,
    D: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    CLUSTER: tl.constexpr,
    EXCHANGE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A row held by the programs of a cluster; its loads stand ahead of the sums."""
    memory = begin(CLUSTER, EXCHANGE)
    if AHEAD:
        begin_behind_those_ahead()
    row, start, columns, at = own_share(D, BLOCK, CLUSTER, VECTOR)
    inside = (columns >= 0) & (columns < D)
    total = read_share(x_ptr, start, columns, at, NUM_ROWS, D, VECTOR)
    if residual_ptr is not None:
        residual = read_share(residual_ptr, start, columns, at, NUM_ROWS, D, VECTOR)
        weight = factor(weight_ptr, columns, inside, OFFSET)
        scale = read_scale(scale_ptr, columns, inside, SCALE_STRIDE)
    if next_rstd_ptr is not None:
        next1 = factor(next1_ptr, columns, inside, OFFSET)
    await_others(CLUSTER)
    if residual_ptr is not None:
        rstd = split_rstd(total, memory, 0, D, EPS, CLUSTER)
        tl.store(rstd_ptr + row, rstd)
        total = residual + total * rstd * weight
        write_share(total_ptr, start, columns, at, total * scale, D, VECTOR)
    if next_rstd_ptr is not None:
        next_rstd = split_rstd(total, memory, 1, D, EPS, CLUSTER)
        tl.store(next_rstd_ptr + row, next_rstd)
        total *= next_rstd
        write_share(y1_ptr, start, columns, at, total * next1, D, VECTOR)
        if y2_ptr is not None:
            next2 = factor(next2_ptr, columns, inside, OFFSET)
            write_share(y2_ptr, start, columns, at, total * next2, D, VECTOR)
        if y3_ptr is not None:
            next3 = factor(next3_ptr, columns, inside, OFFSET)
            write_share(y3_ptr, start, columns, at, total * next3, D, VECTOR)


def sandwich_norm_fwd(
    x: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array | None,
    scale: jax.Array | None,
    next_weights: Sequence[jax.Array | None],
    *,
    eps: float,
    offset: float,
) -> tuple[
    tuple[jax.Array | None, ...],
    jax.Array | None,
    jax.Array | None,
    jax.Array | None,
]:
    """(ys, total, rstd, next_rstd); what is not computed is None."""
    rows, count = num_rows(x), len(next_weights)
    d = x.shape[-1]
    seen_three_times = residual is not None and count > 0
    if sizes := split_sizes(x, several=residual is not None):
        kernel, programs = split_sandwich_norm_fwd_kernel, rows * sizes["CLUSTER"]
        sizes["D"] = d
    else:
        small = None
        if seen_three_times and 2048 < d < 8192:
            small = 512 if d % 1024 == 512 else 1024
        kernel, sizes = sandwich_norm_fwd_kernel, forward_tile(rows, d, small)
        programs = -(-rows // sizes["ROWS"])
    weights = [*next_weights, *[None] * (3 - count)]
    given = {
        "x_ptr": x,
        "residual_ptr": residual,
        "weight_ptr": weight,
        "scale_ptr": scale,
    } | {f"next{i}_ptr": w for i, w in enumerate(weights, 1)}
    results = {f"y{i}_ptr": like(x) if i <= count else None for i in (1, 2, 3)} | {
        "total_ptr": like(residual),
        "rstd_ptr": None if residual is None else per_row(x),
        "next_rstd_ptr": per_row(x) if count else None,
    }
    stride = 0 if scale is None or scale.size == 1 else 1
    *ys, total, rstd, next_rstd = sparse_call(
        kernel,
        (programs,),
        given,
        results,
        sizes | {"EPS": eps, "OFFSET": offset, "SCALE_STRIDE": stride},
    )
    return tuple(ys[:count]), total, rstd, next_rstd
