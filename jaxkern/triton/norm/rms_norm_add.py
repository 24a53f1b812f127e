"""rms_norm_add: the first half of sandwich_norm, with a factor of the sum.

The rows of a decode step are few: a program has one whole, and all of it on its way
before the first sum. More rows take the kernel of sandwich_norm.
"""

from typing import Any

import jax

from jaxkern.gpu.dependent_launch import let_next_begin, wait_for_those_ahead
from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.rows import num_rows
from jaxkern.gpu.triton_call import jit, like, sparse_call, tl
from jaxkern.gpu.triton_call import unsupported as unsupported
from jaxkern.triton.norm.faster_by_xla import slower_at_some_sizes
from jaxkern.triton.norm.row_tiles import factor, per_row, read, read_scale, write
from jaxkern.triton.norm.sandwich_norm import sandwich_norm_fwd
from jaxkern.triton.norm.sandwich_norm_backward import sandwich_norm_bwd
from jaxkern.triton.norm.split_rows import split_sizes

slower_at = slower_at_some_sizes("rms_norm_add")
FEW = 64  # rows
LONGEST = 4096  # columns that a program has at once; longer rows are split


def slower(x: Any, dy: Any = None, **_: Any) -> str | None:
    d = x.shape[-1]
    block = next_power_of_2(d)
    idle = d <= 4096 and 3 * d < 2 * block
    if dy is None and idle and split_sizes(x) is None:
        return f"a row of {d} columns leaves a third of a block of {block} idle"
    return slower_at(x, dy)


@jit
def one_row_kernel(
    x_ptr,
    residual_ptr,
    norm_ptr,
    scale_ptr,
    total_ptr,
    rstd_ptr,
    D: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A row; the weight before the kernel ahead has ended, where AHEAD is READ."""
    if AHEAD:
        let_next_begin()
    if AHEAD == 1:
        wait_for_those_ahead()
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    weight = factor(norm_ptr, columns, inside, OFFSET)
    if AHEAD == 2:
        wait_for_those_ahead()
    at = row.to(tl.int64) * D + columns
    x = read(x_ptr, at, inside)
    residual = read(residual_ptr, at, inside)
    scale = read_scale(scale_ptr, columns, inside, SCALE_STRIDE)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / D + EPS)
    tl.store(rstd_ptr + row, rstd)
    write(total_ptr, at, (residual + x * rstd * weight) * scale, inside)


def one_row_each(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array | None,
    scale: jax.Array | None,
    eps: float,
    offset: float,
) -> tuple[jax.Array | None, jax.Array | None]:
    """(total, rstd) by a program for each row."""
    d = x.shape[-1]
    block = next_power_of_2(d)
    total, rstd = sparse_call(
        one_row_kernel,
        (num_rows(x),),
        {
            "x_ptr": x,
            "residual_ptr": residual,
            "norm_ptr": weight,
            "scale_ptr": scale,
        },
        {"total_ptr": like(residual), "rstd_ptr": per_row(x)},
        {
            "D": d,
            "EPS": eps,
            "OFFSET": offset,
            "SCALE_STRIDE": 0 if scale is None or scale.size == 1 else 1,
            "BLOCK": block,
            "num_warps": max(1, min(8, block // 256)),
        },
    )
    return total, rstd


def rms_norm_add_fwd(x, residual, weight, scale, *, eps, offset):
    if num_rows(x) <= FEW and x.shape[-1] <= LONGEST:
        return one_row_each(x, residual, weight, scale, eps, offset)
    _, total, rstd, _ = sandwich_norm_fwd(
        x, residual, weight, scale, (), eps=eps, offset=offset
    )
    return total, rstd


def rms_norm_add_bwd(x, residual, weight, scale, rstd, dy, *, eps, offset, wanted):
    del eps  # already in rstd
    passes = scale is None  # then dresidual is dy itself
    if passes:
        wanted = (wanted[0], False, *wanted[2:])
    dx, dresidual, dweight, dscale, *_ = sandwich_norm_bwd(
        x,
        residual,
        (weight, scale),
        rstd,
        None,
        (),
        dy,
        offset=offset,
        wanted=wanted,
    )
    return dx, dy if passes else dresidual, dweight, dscale
