"""Gradients of the groups' weights: dw[g] = the sum of dy[i]^T x[i] over its rows."""

from jaxkern.gpu.triton_call import jit, tl
from jaxkern.triton.moe.rows_kernel import place


@jit
def weights_kernel(
    dy_ptr,
    x_ptr,
    starts_ptr,
    stops_ptr,
    dw_ptr,
    F: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """A tile of BLOCK_M of F and BLOCK_N of D, over the rows of one group."""
    group = tl.program_id(0) // (BLOCKS * COLUMNS)
    within = tl.program_id(0) % (BLOCKS * COLUMNS)
    block, column = place(within, BLOCKS, COLUMNS, BESIDE)
    start, stop = tl.load(starts_ptr + group), tl.load(stops_ptr + group)
    f = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = column * BLOCK_N + tl.arange(0, BLOCK_N)
    # what is beyond f or d is not stored: any that is there serves
    at_f = f % F if F % BLOCK_M else f
    at_d = d % D if D % BLOCK_N else d
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(start, stop, BLOCK_K):
        row = first + tl.arange(0, BLOCK_K)
        at = row.to(tl.int64)
        dy = tl.load(
            dy_ptr + at[None, :] * F + at_f[:, None], (row < stop)[None, :], 0.0
        )
        x = tl.load(x_ptr + at[:, None] * D + at_d[None, :], (row < stop)[:, None], 0.0)
        acc = tl.dot(dy, x, acc)
    out = dw_ptr + group.to(tl.int64) * F * D + f[:, None] * D + d[None, :]
    mask = (f < F)[:, None] & (d < D)[None, :]
    tl.store(out, acc.to(dw_ptr.dtype.element_ty), mask)
