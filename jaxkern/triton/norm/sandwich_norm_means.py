"""The means along rows that the gradients of two norms with a sum between them need.

Each norm needs the mean of dxhat xhat. The gradient of the sum, of which the first one
needs it, is linear in the mean that the second one needs: one pass adds up the products
of both.
"""
# ruff: noqa: RUF005 - Triton compiles `a + (b,)` but not `(*a, b)`

from jaxkern.gpu.triton_call import jit, tl
from jaxkern.triton.norm.row_tiles import factor, read_each, read_scale, write


@jit
def rstd_of(ptr, rows, present):
    """A number of each row, [ROWS, 1]; 1 where there is no norm."""
    if ptr is None:
        return 1.0
    else:
        return tl.load(ptr + rows, present, 0.0)


@jit
def normed_and_summed(tiles, ptrs, weight, rstd):
    """xhat of the first norm, and what the second one sees."""
    xhat = tiles[0].to(tl.float32) * rstd
    if ptrs[1] is None:
        return xhat, xhat
    else:
        return xhat, tiles[1].to(tl.float32) + xhat * weight


@jit
def through_readers(tiles, ptrs, next_ptrs, columns, inside, OFFSET: tl.constexpr):
    """The gradient of the normed sum, and those of its readers."""
    dnormed = 0.0
    dys = ()
    for i in tl.static_range(3):
        if ptrs[3 + i] is not None:
            dy = tiles[3 + i].to(tl.float32)
            dnormed += dy * factor(next_ptrs[i], columns, inside, OFFSET)
            dys = dys + (dy,)
    return dnormed, dys


@jit
def products_along(
    ptrs,
    factor_ptrs,
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
    """Products of rows added up over chunks, [ROWS, BLOCK], for `means_of`."""
    weight_ptr, scale_ptr = factor_ptrs
    by_next = tl.zeros([ROWS, BLOCK], tl.float32)
    direct = tl.zeros([ROWS, BLOCK], tl.float32)
    across = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(0, D, BLOCK, loop_unroll_factor=2):
        columns = first + tl.arange(0, BLOCK)[None, :]
        inside = columns < D
        tiles = read_each(ptrs, 6, start + columns, present & inside, True)
        weight = factor(weight_ptr, columns, inside, OFFSET)
        xhat, total = normed_and_summed(tiles, ptrs, weight, rstd)
        xhat *= weight
        if ptrs[2] is not None:
            scale = read_scale(scale_ptr, columns, inside, SCALE_STRIDE)
            direct += tiles[2].to(tl.float32) * scale * xhat
        if ptrs[3] is not None:
            dnormed, _ = through_readers(
                tiles, ptrs, next_ptrs, columns, inside, OFFSET
            )
            total *= next_rstd
            by_next += dnormed * total
            direct += dnormed * next_rstd * xhat
            across += total * next_rstd * xhat
    return by_next, direct, across


@jit
def means_of(by_next, direct, across, D: tl.constexpr):
    """Of dxhat xhat over rows, [ROWS, 1], for the first norm and the second."""
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
    by_next, direct, across = products_along(
        (x_ptr, residual_ptr, dtotal_ptr, dy1_ptr, dy2_ptr, dy3_ptr),
        (weight_ptr, scale_ptr),
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
    along, next_along = means_of(by_next, direct, across, D)
    write(along_ptr, row, along, row >= 0)
    write(next_along_ptr, row, next_along, row >= 0)
