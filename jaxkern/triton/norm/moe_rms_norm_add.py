"""Combines the experts of a token, normalises, adds the residual, normed or as it is.

    mixed = sum_e expert_weights_e * expert_outputs_e
    y = mixed / rms(mixed) * (weight + offset) + residual   (or its norm)

A program holds the mixed row in registers: the experts' outputs are read once forward.
Backward reads them once more, from the caches, for the gradient of the router.
"""

import jax
import jax.numpy as jnp

from jaxkern.triton import triton_call
from jaxkern.triton.block_sizes import next_power_of_2, num_programs, tuned
from jaxkern.triton.norm.row_tiles import (
    factor,
    num_rows,
    per_row,
    read,
    read_and_keep,
    summed,
    write,
)
from jaxkern.triton.triton_call import jit, like, sparse_call, tl

LONGEST = 8192  # columns of a row that stays in registers
MOST_EXPERTS = 32  # of a token: the loop over them is unrolled


def unsupported(*, expert_outputs, residual, **named) -> str | None:
    *_, experts, d = expert_outputs.shape
    if d > LONGEST:
        return f"a row has {d} columns, more than {LONGEST}"
    if experts > MOST_EXPERTS:
        return f"a token has {experts} experts, more than {MOST_EXPERTS}"
    return triton_call.unsupported(
        expert_outputs=expert_outputs, residual=residual, **named
    )


def row_sizes(kernel: str, d: int, dtype) -> dict:
    block = next_power_of_2(d)
    rule = {"BLOCK": block, "WAVES": 2, "num_warps": min(16, max(1, block // 512))}
    return tuned(kernel, d, dtype, rule)


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
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    added = read(residual_ptr, row * D + columns, inside)
    mixed = mix(outputs_ptr, weights_ptr, row, columns, inside, E, D, BLOCK)
    rstd = tl.rsqrt(tl.sum(mixed * mixed, 0) / D + EPS)
    tl.store(rstd_ptr + row, rstd)
    residual_rstd = rstd * 0.0 + 1.0
    if NORM_RESIDUAL:
        residual_rstd = tl.rsqrt(tl.sum(added * added, 0) / D + EPS)
        added *= residual_rstd * factor(residual_weight_ptr, columns, inside, OFFSET)
    tl.store(residual_rstd_ptr + row, residual_rstd)
    y = added + mixed * rstd * factor(weight_ptr, columns, inside, OFFSET)
    write(y_ptr, row * D + columns, y, inside)


def moe_rms_norm_add_fwd(
    expert_outputs,
    expert_weights,
    residual,
    weight,
    residual_weight,
    *,
    normalize_residual,
    eps,
    offset,
):
    *_, experts, d = expert_outputs.shape
    sizes = row_sizes("moe_norm_fwd", d, residual.dtype)
    del sizes["WAVES"]
    return sparse_call(
        moe_norm_fwd_kernel,
        (num_rows(residual),),
        {
            "outputs_ptr": expert_outputs,
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


@jit
def moe_norm_bwd_kernel(
    outputs_ptr,
    weights_ptr,
    residual_ptr,
    weight_ptr,
    residual_weight_ptr,
    rstd_ptr,
    residual_rstd_ptr,
    dy_ptr,
    doutputs_ptr,
    dexperts_ptr,
    dresidual_ptr,
    dweight_ptr,
    dresidual_weight_ptr,
    NUM_ROWS: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    OFFSET: tl.constexpr,
    NORM_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    scale = factor(weight_ptr, columns, inside, OFFSET)
    residual_scale = factor(residual_weight_ptr, columns, inside, OFFSET)
    dweight = tl.zeros([BLOCK], tl.float32)
    dresidual_weight = tl.zeros([BLOCK], tl.float32)
    for index in tl.range(tl.program_id(0), NUM_ROWS, PROGRAMS):
        row = tl.cast(index, tl.int64)
        dy = read(dy_ptr, row * D + columns, inside)
        rstd = tl.load(rstd_ptr + row)
        xhat = mix(outputs_ptr, weights_ptr, row, columns, inside, E, D, BLOCK) * rstd
        dweight += dy * xhat
        dxhat = dy * scale
        dmixed = (dxhat - xhat * (tl.sum(dxhat * xhat, 0) / D)) * rstd
        for e in tl.static_range(E):
            at = (row * E + e) * D + columns
            if doutputs_ptr is not None:
                w = tl.load(weights_ptr + row * E + e).to(tl.float32)
                write(doutputs_ptr, at, w * dmixed, inside)
            if dexperts_ptr is not None:
                share = tl.sum(read(outputs_ptr, at, inside) * dmixed, 0)
                tl.store(dexperts_ptr + row * E + e, share)
        if NORM_RESIDUAL:
            residual_rstd = tl.load(residual_rstd_ptr + row)
            xhat = read(residual_ptr, row * D + columns, inside) * residual_rstd
            dresidual_weight += dy * xhat
            dxhat = dy * residual_scale
            du = (dxhat - xhat * (tl.sum(dxhat * xhat, 0) / D)) * residual_rstd
            write(dresidual_ptr, row * D + columns, du, inside)
    at = tl.program_id(0).to(tl.int64) * D + columns
    write(dweight_ptr, at, dweight, inside)
    write(dresidual_weight_ptr, at, dresidual_weight, inside)


def moe_rms_norm_add_bwd(
    expert_outputs,
    expert_weights,
    residual,
    weight,
    residual_weight,
    rstd,
    residual_rstd,
    dy,
    *,
    normalize_residual,
    eps,
    offset,
    wanted,
):
    del eps  # already in rstd
    rows, experts, d = num_rows(residual), *expert_outputs.shape[-2:]
    sizes = row_sizes("moe_norm_bwd", d, residual.dtype)
    programs = num_programs(rows, sizes.pop("WAVES"))
    partial = jax.ShapeDtypeStruct((programs, d), jnp.float32)
    normed = residual if normalize_residual else None
    results = {
        "doutputs_ptr": like(expert_outputs),
        "dexperts_ptr": like(expert_weights),
        "dresidual_ptr": like(normed),
        "dweight_ptr": None if weight is None else partial,
        "dresidual_weight_ptr": None if residual_weight is None else partial,
    }
    grads = sparse_call(
        moe_norm_bwd_kernel,
        (programs,),
        {
            "outputs_ptr": expert_outputs,
            "weights_ptr": expert_weights,
            "residual_ptr": normed,
            "weight_ptr": weight,
            "residual_weight_ptr": residual_weight,
            "rstd_ptr": rstd,
            "residual_rstd_ptr": residual_rstd if normalize_residual else None,
            "dy_ptr": dy,
        },
        {
            n: r if w else None
            for (n, r), w in zip(results.items(), wanted, strict=True)
        },
        sizes
        | {
            "NUM_ROWS": rows,
            "PROGRAMS": programs,
            "E": experts,
            "D": d,
            "OFFSET": offset,
            "NORM_RESIDUAL": normalize_residual,
        },
    )
    doutputs, dexperts, dresidual, dweight, dresidual_weight = grads
    return (
        doutputs,
        dexperts,
        dresidual if normalize_residual else dy,
        summed(dweight, weight),
        summed(dresidual_weight, residual_weight),
    )
