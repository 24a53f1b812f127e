"""The backward kernels of experts mixed, normed and added.

A program walks over rows that it mixes again; the experts' outputs are read once more,
from the caches, for the gradient of the router. Rows that do not fit in registers are
cut into stripes of columns. Before, a kernel of its own finds the means along them, and
the gradient of the router: dmixed is linear in the mean that it needs, so that products
with what it is made of are added up in one pass.
"""
# ruff: noqa: RUF005 - Triton compiles `a + (b,)` but not `(*a, b)`

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import num_programs, num_sms
from jaxkern.gpu.rows import num_rows
from jaxkern.gpu.triton_call import jit, like, sparse_call, tl
from jaxkern.triton.norm.moe_rms_norm_add.fwd import LONGEST, mix, row_sizes
from jaxkern.triton.norm.moe_rms_norm_add.fwd import slower as slower
from jaxkern.triton.norm.moe_rms_norm_add.fwd import unsupported as unsupported
from jaxkern.triton.norm.row_tiles import factor, per_row, read, summed, write


@jit
def moe_norm_means_kernel(
    outputs_ptr,
    weights_ptr,
    residual_ptr,
    weight_ptr,
    residual_weight_ptr,
    rstd_ptr,
    residual_rstd_ptr,
    dy_ptr,
    along_ptr,
    residual_along_ptr,
    dexperts_ptr,
    E: tl.constexpr,
    D: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Means of dxhat xhat, of the mixed row and the residual; the router's gradient."""
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    weights = ()
    by_dxhat = ()
    by_mixed = ()
    for e in tl.static_range(E):
        zeros = tl.zeros([BLOCK], tl.float32)
        weights = weights + (tl.load(weights_ptr + row * E + e).to(tl.float32),)
        by_dxhat = by_dxhat + (zeros,)
        by_mixed = by_mixed + (zeros,)
    of_residual = tl.zeros([BLOCK], tl.float32)
    for first in range(0, D, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < D
        dy = read(dy_ptr, row * D + columns, inside)
        if residual_along_ptr is not None:
            scale = factor(residual_weight_ptr, columns, inside, OFFSET)
            of_residual += dy * scale * read(residual_ptr, row * D + columns, inside)
        mixed = tl.zeros([BLOCK], tl.float32)
        outputs = ()
        for e in tl.static_range(E):
            output = read(outputs_ptr, (row * E + e) * D + columns, inside)
            mixed += weights[e] * output
            outputs = outputs + (output,)
        dxhat = dy * factor(weight_ptr, columns, inside, OFFSET)
        more_dxhat = ()
        more_mixed = ()
        for e in tl.static_range(E):
            more_dxhat = more_dxhat + (by_dxhat[e] + outputs[e] * dxhat,)
            more_mixed = more_mixed + (by_mixed[e] + outputs[e] * mixed,)
        by_dxhat = more_dxhat
        by_mixed = more_mixed
    along = 0.0
    sums = ()
    for e in tl.static_range(E):
        sums = sums + (tl.sum(by_dxhat[e], 0),)
        along += weights[e] * sums[e] * rstd / D
    tl.store(along_ptr + row, along)
    if dexperts_ptr is not None:
        for e in tl.static_range(E):
            dexpert = (sums[e] - tl.sum(by_mixed[e], 0) * rstd * along) * rstd
            tl.store(dexperts_ptr + row * E + e, dexpert)
    if residual_along_ptr is not None:
        along = tl.sum(of_residual, 0) / D * tl.load(residual_rstd_ptr + row)
        tl.store(residual_along_ptr + row, along)


@jit
def mean_of(ptr, row, products, D: tl.constexpr):
    """The mean along a row: as it was given, or of the products of the whole row."""
    if ptr is None:
        return tl.sum(products, 0) / D
    else:
        return tl.load(ptr + row)


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
    along_ptr,
    residual_along_ptr,
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
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
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
        along = mean_of(along_ptr, row, dxhat * xhat, D)
        dmixed = (dxhat - xhat * along) * rstd
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
            along = mean_of(residual_along_ptr, row, dxhat * xhat, D)
            du = (dxhat - xhat * along) * residual_rstd
            write(dresidual_ptr, row * D + columns, du, inside)
    at = tl.program_id(0).to(tl.int64) * D + columns
    write(dweight_ptr, at, dweight, inside)
    write(dresidual_weight_ptr, at, dresidual_weight, inside)


def moe_rms_norm_add_bwd(
    expert_out,
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
    rows, experts, d = num_rows(residual), *expert_out.shape[-2:]
    options = {"E": experts, "D": d, "OFFSET": offset}
    normed = residual if normalize_residual else None
    given = {
        "outputs_ptr": expert_out,
        "weights_ptr": expert_weights,
        "residual_ptr": normed,
        "weight_ptr": weight,
        "residual_weight_ptr": residual_weight,
        "rstd_ptr": rstd,
        "residual_rstd_ptr": residual_rstd if normalize_residual else None,
        "dy_ptr": dy,
    }
    names = ("doutputs", "dexperts", "dresidual", "dweight", "dresidual_weight")
    wanted = dict(zip(names, wanted, strict=True))
    sizes, stripes = backward_sizes(residual)
    means = {"along_ptr": None, "residual_along_ptr": None}
    dexperts = like(expert_weights) if wanted["dexperts"] else None
    if stripes > 1:
        mean = per_row(residual)
        *found, dexperts = sparse_call(
            moe_norm_means_kernel,
            (rows,),
            given,
            {
                "along_ptr": mean,
                "residual_along_ptr": mean if normalize_residual else None,
                "dexperts_ptr": dexperts,
            },
            options | means_sizes(experts),
        )
        means = dict(zip(means, found, strict=True))
    partial = jax.ShapeDtypeStruct((sizes["PROGRAMS"], d), jnp.float32)
    results = {
        "doutputs_ptr": like(expert_out),
        "dexperts_ptr": like(expert_weights) if stripes == 1 else None,
        "dresidual_ptr": like(normed),
        "dweight_ptr": None if weight is None else partial,
        "dresidual_weight_ptr": None if residual_weight is None else partial,
    }
    doutputs, within, dresidual, dweight, dresidual_weight = sparse_call(
        moe_norm_bwd_kernel,
        (sizes["PROGRAMS"], stripes),
        given | means,
        {
            n: r if w else None
            for (n, r), w in zip(results.items(), wanted.values(), strict=True)
        },
        sizes | options | {"NORM_RESIDUAL": normalize_residual},
    )
    return (
        doutputs,
        within if stripes == 1 else dexperts,
        dresidual if normalize_residual else dy,
        summed(dweight, weight),
        summed(dresidual_weight, residual_weight),
    )


def means_sizes(experts: int) -> dict:
    """A chunk of columns; registers hold two sums for each expert beside it."""
    block = 1024 if experts <= 8 else 256
    return {"BLOCK": block, "num_warps": 4}


def backward_sizes(residual: jax.Array) -> tuple[dict, int]:
    """(sizes of the launch, number of stripes of columns)."""
    rows, d = num_rows(residual), residual.shape[-1]
    if d <= LONGEST:
        sizes = row_sizes(d, residual.dtype)
        programs, stripes = num_programs(rows, sizes.pop("WAVES")), 1
    else:
        sizes = {"BLOCK": 1024, "WAVES": 4, "num_warps": 4}
        stripes = -(-d // sizes["BLOCK"])
        programs = max(1, min(sizes.pop("WAVES") * num_sms() // stripes, rows))
    return sizes | {"NUM_ROWS": rows, "PROGRAMS": programs}, stripes
