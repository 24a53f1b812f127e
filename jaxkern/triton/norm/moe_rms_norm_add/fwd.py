"""Combines the experts of a token, normalises, adds the residual, normed or as it is.

    mixed = sum_e expert_weights_e * expert_out_e
    y = mixed / rms(mixed) * (weight + offset) + residual   (or its norm)

A program holds the mixed row in registers: the experts' outputs are read once. A long
row is mixed once for the statistics and again, mostly from the caches, for the result.
"""

from typing import Any

import jax.numpy as jnp

from jaxkern.gpu import triton_call
from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.rows import num_rows
from jaxkern.gpu.triton_call import jit, like, sparse_call, tl
from jaxkern.triton.norm.row_tiles import factor, per_row, read, read_and_keep, write

LONGEST = 8192  # columns of a row that stays in registers
MOST_BYTES = 2**19  # of a token that is read twice: XLA mixes larger ones faster
MOST_EXPERTS = 32  # of a token: the loop over them is unrolled


def unsupported(*, expert_out, residual, **named) -> str | None:
    experts = expert_out.shape[-2]
    if experts > MOST_EXPERTS:
        return f"a token has {experts} experts, more than {MOST_EXPERTS}"
    return triton_call.unsupported(expert_out=expert_out, residual=residual, **named)


def slower(expert_out: Any, dy: Any = None, **_: Any) -> str | None:
    experts, d = expert_out.shape[-2:]
    size = experts * d * expert_out.dtype.itemsize
    if dy is None and d > LONGEST and size > MOST_BYTES:
        return f"the {size} bytes of a token's experts do not stay in the caches"
    return None


def row_sizes(d: int, dtype) -> dict:
    """A whole row, or chunks of it by many warps: fewer rows compete for the caches."""
    block = next_power_of_2(d)
    warps = min(16, max(1, block // 512))
    if d > LONGEST:
        aligned = d * jnp.dtype(dtype).itemsize % 16 == 0
        block, warps = (8192, 32) if aligned else (2048, 16)
    return {"BLOCK": block, "WAVES": 2, "num_warps": warps}


@jit
def mix(
    outputs_ptr,
    weights_ptr,
    row,
    columns,
    inside,
    E: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    mixed = tl.zeros([BLOCK], tl.float32)
    for e in tl.static_range(E):
        at = (row * E + e) * D + columns
        w = tl.load(weights_ptr + row * E + e).to(tl.float32)
        mixed += w * read_and_keep(outputs_ptr, at, inside)
    return mixed


@jit
def moe_norm_fwd_kernel(
    outputs_ptr,
    weights_ptr,
    residual_ptr,
    weight_ptr,
    residual_weight_ptr,
    y_ptr,
    rstd_ptr,
    residual_rstd_ptr,
    E: tl.constexpr,
    D: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    NORM_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mixed = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    residual_squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, D, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < D
        mixed = mix(outputs_ptr, weights_ptr, row, columns, inside, E, D, BLOCK)
        squares += mixed * mixed
        if NORM_RESIDUAL:
            added = read_and_keep(residual_ptr, row * D + columns, inside)
            residual_squares += added * added
    rstd = tl.rsqrt(tl.sum(squares, 0) / D + EPS)
    tl.store(rstd_ptr + row, rstd)
    residual_rstd = rstd * 0.0 + 1.0
    if NORM_RESIDUAL:
        residual_rstd = tl.rsqrt(tl.sum(residual_squares, 0) / D + EPS)
    tl.store(residual_rstd_ptr + row, residual_rstd)
    for first in range(0, D, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < D
        if D > BLOCK:
            mixed = mix(outputs_ptr, weights_ptr, row, columns, inside, E, D, BLOCK)
        added = read(residual_ptr, row * D + columns, inside)
        if NORM_RESIDUAL:
            scale = factor(residual_weight_ptr, columns, inside, OFFSET)
            added *= residual_rstd * scale
        y = added + mixed * rstd * factor(weight_ptr, columns, inside, OFFSET)
        write(y_ptr, row * D + columns, y, inside)


def moe_rms_norm_add_fwd(
    expert_out,
    expert_weights,
    residual,
    weight,
    residual_weight,
    *,
    normalize_residual,
    eps,
    offset,
):
    *_, experts, d = expert_out.shape
    sizes = row_sizes(d, residual.dtype)
    del sizes["WAVES"]
    return sparse_call(
        moe_norm_fwd_kernel,
        (num_rows(residual),),
        {
            "outputs_ptr": expert_out,
            "weights_ptr": expert_weights,
            "residual_ptr": residual,
            "weight_ptr": weight,
            "residual_weight_ptr": residual_weight,
        },
        {
            "y_ptr": like(residual),
            "rstd_ptr": per_row(residual),
            "residual_rstd_ptr": per_row(residual),
        },
        sizes
        | {
            "E": experts,
            "D": d,
            "EPS": eps,
            "OFFSET": offset,
            "NORM_RESIDUAL": normalize_residual,
        },
    )
