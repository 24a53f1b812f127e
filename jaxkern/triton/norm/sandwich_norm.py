"""The kernels of two norms with a sum between them; either half may be absent.

    total = (residual + x / rms(x) * (weight + offset)) * scale
    y_i   = total / rms(total) * (next_weight_i + offset)               i = 1 ... 3

rms_norm_add is the first line, multi_rms_norm the second with x for the total, and
sandwich_rms_norm both. From memory each tensor is read once and each result written
once. A forward program sees its rows two or three times, then mostly in the caches; a
backward program holds them in registers, beside a sum for each vector's gradient.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxkern.triton import triton_call
from jaxkern.triton.norm.row_tiles import (
    backward_tile,
    factor,
    forward_tile,
    num_rows,
    per_row,
    read,
    read_and_keep,
    summed,
    write,
)
from jaxkern.triton.triton_call import jit, like, sparse_call, tl

LONGEST = 8192  # columns of a row that stays in registers, backward
LONGEST_OF_THREE = 4096  # and beside the sums of three weights and more


def unsupported(*, x, rstd=None, **named) -> str | None:
    longest = LONGEST_OF_THREE if "dy3" in named else LONGEST
    if rstd is not None and x.shape[-1] > longest:
        return f"a row has {x.shape[-1]} columns, more than {longest}"
    return triton_call.unsupported(x=x, **named)


@jit
def read_scale(scale_ptr, columns, inside, STRIDE: tl.constexpr):
    """The factor of the sum: one number or a vector."""
    if scale_ptr is None:
        return 1.0
    else:
        return tl.load(scale_ptr + columns * STRIDE, inside, 0.0).to(tl.float32)


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
):
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
    small = seen_three_times and 2048 < d < 8192
    sizes = forward_tile("sandwich_norm_fwd", rows, d, x.dtype, small)
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
        sandwich_norm_fwd_kernel,
        (-(-rows // sizes["ROWS"]),),
        given,
        results,
        sizes | {"EPS": eps, "OFFSET": offset, "SCALE_STRIDE": stride},
    )
    return tuple(ys[:count]), total, rstd, next_rstd


@jit
def sandwich_norm_bwd_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    scale_ptr,
    next1_ptr,
    next2_ptr,
    next3_ptr,
    rstd_ptr,
    next_rstd_ptr,
    dy1_ptr,
    dy2_ptr,
    dy3_ptr,
    dtotal_ptr,
    dx_ptr,
    dresidual_ptr,
    dweight_ptr,
    dscale_ptr,
    dnext1_ptr,
    dnext2_ptr,
    dnext3_ptr,
    NUM_ROWS: tl.constexpr,
    D: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < D
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    dscale = tl.zeros([ROWS, BLOCK], tl.float32)
    dnext1 = tl.zeros([ROWS, BLOCK], tl.float32)
    dnext2 = tl.zeros([ROWS, BLOCK], tl.float32)
    dnext3 = tl.zeros([ROWS, BLOCK], tl.float32)
    num_blocks: tl.constexpr = (NUM_ROWS + ROWS - 1) // ROWS
    for block in tl.range(tl.program_id(0), num_blocks, PROGRAMS, num_stages=STAGES):
        rows = block * ROWS + tl.arange(0, ROWS)[:, None]
        present = rows < NUM_ROWS
        mask = present & inside
        at = rows.to(tl.int64) * D + columns  # [ROWS, BLOCK]
        # vectors are read each time: held over the loop they would cost registers
        weight = factor(weight_ptr, columns, inside, OFFSET)
        xhat = read(x_ptr, at, mask)
        total = xhat
        if rstd_ptr is not None:
            rstd = tl.load(rstd_ptr + rows, present, 0.0)
            xhat *= rstd
            if residual_ptr is not None:
                total = read(residual_ptr, at, mask) + xhat * weight
        dsum = tl.zeros([ROWS, BLOCK], tl.float32)
        if dtotal_ptr is not None:
            dsum = read(dtotal_ptr, at, mask)
            if dscale_ptr is not None:
                dscale += dsum * total
            dsum *= read_scale(scale_ptr, columns, inside, SCALE_STRIDE)
        if dy1_ptr is not None:
            next_rstd = tl.load(next_rstd_ptr + rows, present, 0.0)
            total *= next_rstd
            dy = read(dy1_ptr, at, mask)
            dnormed = dy * factor(next1_ptr, columns, inside, OFFSET)
            if dnext1_ptr is not None:
                dnext1 += dy * total
            if dy2_ptr is not None:
                dy = read(dy2_ptr, at, mask)
                dnormed += dy * factor(next2_ptr, columns, inside, OFFSET)
                if dnext2_ptr is not None:
                    dnext2 += dy * total
            if dy3_ptr is not None:
                dy = read(dy3_ptr, at, mask)
                dnormed += dy * factor(next3_ptr, columns, inside, OFFSET)
                if dnext3_ptr is not None:
                    dnext3 += dy * total
            along = tl.sum(dnormed * total, 1, keep_dims=True) / D
            dsum += (dnormed - total * along) * next_rstd
        write(dresidual_ptr, at, dsum, mask)
        if dweight_ptr is not None:
            dweight += dsum * xhat
        if rstd_ptr is not None:
            dsum *= weight
            along = tl.sum(dsum * xhat, 1, keep_dims=True) / D
            dsum = (dsum - xhat * along) * rstd
        write(dx_ptr, at, dsum, mask)
    at = tl.program_id(0).to(tl.int64) * D + columns
    write(dweight_ptr, at, tl.sum(dweight, 0, keep_dims=True), inside)
    write(dscale_ptr, at, tl.sum(dscale, 0, keep_dims=True), inside)
    write(dnext1_ptr, at, tl.sum(dnext1, 0, keep_dims=True), inside)
    write(dnext2_ptr, at, tl.sum(dnext2, 0, keep_dims=True), inside)
    write(dnext3_ptr, at, tl.sum(dnext3, 0, keep_dims=True), inside)


def sandwich_norm_bwd(
    x: jax.Array,
    residual: jax.Array | None,
    vectors: Sequence[jax.Array | None],
    rstd: jax.Array | None,
    next_rstd: jax.Array | None,
    dys: Sequence[jax.Array],
    dtotal: jax.Array | None,
    *,
    offset: float,
    wanted: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    """Gradients of x, residual and the vectors, where wanted.

    Args:
      vectors: weight, scale and the next weights.
      wanted: for x, residual and each of them.
    """
    d, count = x.shape[-1], len(dys)
    vectors = [*vectors, *[None] * (5 - len(vectors))]
    wanted = [*wanted, *[False] * (7 - len(wanted))]
    scale = vectors[1]
    # the sum itself is needed where a norm or a factor stands behind it
    held = residual if count or wanted[3] else None
    read_once = (x, held, dtotal, *dys, *vectors)
    streams = sum(v is not None for v in read_once)
    stages = 3 if d <= LONGEST_OF_THREE else 2
    sizes = backward_tile("sandwich_norm_bwd", x, streams, LONGEST_OF_THREE, stages)
    partial = jax.ShapeDtypeStruct((sizes["PROGRAMS"], d), jnp.float32)
    names = ("weight", "scale", "next1", "next2", "next3")
    given = {"x_ptr": x, "residual_ptr": held}
    given |= {f"{n}_ptr": v for n, v in zip(names, vectors, strict=True)}
    given |= {"rstd_ptr": rstd, "next_rstd_ptr": next_rstd}
    rest = [*dys, *[None] * (3 - count)]
    given |= {f"dy{i}_ptr": dy for i, dy in enumerate(rest, 1)}
    given |= {"dtotal_ptr": dtotal}
    targets = [like(x), like(residual)]
    targets += [None if v is None else partial for v in vectors]
    results = {
        f"d{n}_ptr": t if w else None
        for n, t, w in zip(("x", "residual", *names), targets, wanted, strict=True)
    }
    stride = 0 if scale is None or scale.size == 1 else 1
    dx, dresidual, *sums = sparse_call(
        sandwich_norm_bwd_kernel,
        (sizes["PROGRAMS"],),
        given,
        results,
        sizes | {"OFFSET": offset, "SCALE_STRIDE": stride},
    )
    if scale is not None and sums[1] is not None and scale.size == 1:
        sums[1] = sums[1].sum(-1, keepdims=True)
    return dx, dresidual, *map(summed, sums, vectors)
