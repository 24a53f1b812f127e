"""The means along rows that the gradients of two norms with a sum between them need.

Each norm needs the mean of dxhat xhat. The gradient of the sum, of which the first one
needs it, is linear in the mean that the second one needs: one pass adds up the products
of both.
"""
# ruff: noqa: RUF005 - Triton compiles `a + (b,)` but not `(*a, b)`

from jaxkern.triton.norm.row_tiles import factor, read_again, read_scale, write
from jaxkern.triton.triton_call import jit, tl


@jit
def rstd_of(ptr, rows, present):
    """Of rows, [ROWS, 1]; 1 where there is no norm."""
    if ptr is None:
        return 1.0
    else:
        return tl.load(ptr + rows, present, 0.0)


@jit
def normed_and_summed(x_ptr, residual_ptr, weight, rstd, at, mask, AGAIN: tl.constexpr):
    """xhat of the first norm, and what the second one sees."""
    xhat = read_again(x_ptr, at, mask, AGAIN) * rstd
    if residual_ptr is None:
        return xhat, xhat
    else:
        return xhat, read_again(residual_ptr, at, mask, AGAIN) + xhat * weight


@jit
def read_readers(
    dy_ptrs,
    next_ptrs,
    at,
    columns,
    mask,
    inside,
    OFFSET: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """The gradient of the normed sum, and those of its readers."""
    dnormed = 0.0
    dys = ()
    for i in tl.static_range(3):
        if dy_ptrs[i] is not None:
            dy = read_again(dy_ptrs[i], at, mask, AGAIN)
            dnormed += dy * factor(next_ptrs[i], columns, inside, OFFSET)
            dys = dys + (dy,)
    return dnormed, dys


@jit
def means_along(
    x_ptr,
    residual_ptr,
    weight_ptr,
    scale_ptr,
    dtotal_ptr,
    dy_ptrs,
    next_ptrs,
    start,
    present,
    rstd,
    next_rstd,
    D: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The means of dxhat xhat over rows, [ROWS, 1], for the first and second norm."""
    by_next = tl.zeros([ROWS, BLOCK], tl.float32)
    direct = tl.zeros([ROWS, BLOCK], tl.float32)
    across = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, D, BLOCK):
        columns = first + tl.arange(0, BLOCK)[None, :]
        inside = columns < D
        mask = present & inside
        at = start + columns
        weight = factor(weight_ptr, columns, inside, OFFSET)
        xhat, total = normed_and_summed(
            x_ptr, residual_ptr, weight, rstd, at, mask, True
        )
        xhat *= weight
        if dtotal_ptr is not None:
            dsum = read_again(dtotal_ptr, at, mask, True)
            direct += dsum * read_scale(scale_ptr, columns, inside, SCALE_STRIDE) * xhat
        if dy_ptrs[0] is not None:
            dnormed, _ = read_readers(
                dy_ptrs, next_ptrs, at, columns, mask, inside, OFFSET, True
            )
            total *= next_rstd
            by_next += dnormed * total
            direct += dnormed * next_rstd * xhat
            across += total * next_rstd * xhat
    next_along = tl.sum(by_next, 1, keep_dims=True) / D
    direct -= next_along * across
    return tl.sum(direct, 1, keep_dims=True) / D, next_along


@jit
def sandwich_norm_means_kernel(
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
    along_ptr,
    next_along_ptr,
    D: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) + tl.zeros([1, 1], tl.int32)
    along, next_along = means_along(
        x_ptr,
        residual_ptr,
        weight_ptr,
        scale_ptr,
        dtotal_ptr,
        (dy1_ptr, dy2_ptr, dy3_ptr),
        (next1_ptr, next2_ptr, next3_ptr),
        row.to(tl.int64) * D,
        row >= 0,
        rstd_of(rstd_ptr, row, row >= 0),
        rstd_of(next_rstd_ptr, row, row >= 0),
        D,
        OFFSET,
        SCALE_STRIDE,
        1,
        BLOCK,
    )
    write(along_ptr, row, along, row >= 0)
    write(next_along_ptr, row, next_along, row >= 0)
