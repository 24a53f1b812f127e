"""Blocks of 16 x 16 of a chunk's matrices, and the inverse of I + A from them.

Blocks doubled in size have the inverse x - x A x, with A below the diagonal blocks and
their inverses x. Products take their right side turned (block_products.py), so beside x
stands y, the same turned, and beside both `step`, the turned A x.
"""

from jaxkern.gpu.triton_call import constexpr_function, gl, gluon_jit
from jaxkern.triton.delta_rule.gated_delta_rule.block_products import (
    negative_product,
    subtract_product,
)


@constexpr_function
def number(i, j):
    """Of block (i, j) among those on and below the diagonal."""
    return i * (i + 1) // 2 + j


@constexpr_function
def sums_layout(warps):
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon_jit
def places(W: gl.constexpr, R: gl.constexpr, C: gl.constexpr, L: gl.constexpr):
    """Warp, row and column."""
    warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    row = gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    column = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    return warp[:, None, None], row[None, :, None], column[None, None, :]


@gluon_jit
def zero_block(W: gl.constexpr):
    return gl.zeros([W, 16, 16], gl.float32, sums_layout(W))


@gluon_jit
def doubled(x, y, a, row, column, SIZE: gl.constexpr):
    """Inverses of blocks of 2*SIZE up to 8 from those of SIZE: x + x lower x."""
    inside = row // (2 * SIZE) == column // (2 * SIZE)
    lower = gl.where(inside & (row // SIZE > column // SIZE), a, 0.0)
    step = negative_product(y, lower, "on the diagonal")
    x, y = (
        subtract_product(x, step, x, "on the diagonal"),
        subtract_product(step, x, y, "on the diagonal"),
    )
    return x, y


@gluon_jit
def inverse_of_block(a):
    """(I - a)^-1 for a strictly lower block, and it turned."""
    W: gl.constexpr = a.shape[0]
    _, row, column = places(W, 16, 16, sums_layout(W))
    one = gl.where(row == column, 1.0, zero_block(W))
    x = one + gl.where(row // 2 == column // 2, a, 0.0)
    y = negative_product(-one, x, "on the diagonal")
    x, y = doubled(x, y, a, row, column, 2)
    x, y = doubled(x, y, a, row, column, 4)
    lower = gl.where(row // 8 > column // 8, a, 0.0)
    step = negative_product(y, lower, "first terms, second columns")
    x, y = (
        subtract_product(x, step, x, "second terms, first columns"),
        subtract_product(step, x, y, "second terms, second columns"),
    )
    return x, y


@gluon_jit
def of_two_blocks(x, y, a):
    """(x a x', and it turned), with x' turned in y."""
    step = negative_product(y, a)
    return negative_product(x, step), negative_product(step, x)


@gluon_jit
def unit_lower_inverse(a):
    """(I - a)^-1 and it turned, for the blocks of a strictly lower `[64, 64]`."""
    x00, y00 = inverse_of_block(a[0])
    x11, y11 = inverse_of_block(a[2])
    x22, y22 = inverse_of_block(a[5])
    x33, y33 = inverse_of_block(a[9])
    x10, y10 = of_two_blocks(x11, y00, a[1])
    x32, y32 = of_two_blocks(x33, y22, a[8])
    step20 = subtract_product(y10, a[4], negative_product(y00, a[3]))
    step21 = negative_product(y11, a[4])
    step30 = subtract_product(y10, a[7], negative_product(y00, a[6]))
    step31 = negative_product(y11, a[7])
    x20, y20 = negative_product(x22, step20), negative_product(step20, x22)
    x21, y21 = negative_product(x22, step21), negative_product(step21, x22)
    x30 = subtract_product(x33, step30, negative_product(x32, step20))
    y30 = subtract_product(step30, x33, negative_product(step20, x32))
    x31 = subtract_product(x33, step31, negative_product(x32, step21))
    y31 = subtract_product(step31, x33, negative_product(step21, x32))
    x = (x00, x10, x11, x20, x21, x22, x30, x31, x32, x33)
    return x, (y00, y10, y11, y20, y21, y22, y30, y31, y32, y33)
