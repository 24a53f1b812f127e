"""Experts of MXFP4 and NVFP4: of a few tokens by row_experts.py, of more sorted."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.gpu.device import next_power_of_2
from jaxkern.gpu.triton_call import sparse_call
from jaxkern.triton.moe.few_slots import are_many, refusal
from jaxkern.triton.moe.grouped_slots import (
    TILE,
    Packed,
    grouped_hidden,
    grouped_sum,
    refusal_of_many,
)
from jaxkern.triton.quant import row_products
from jaxkern.triton.quant.microscaled import rows_of
from jaxkern.triton.quant.row_experts import row_hidden_kernel, row_sum_kernel
from jaxkern.triton.quant.row_problem import RowProblem

OF_SUM = 8, 16  # warps of a result, where they have few batches and where many


def refusal_of_rows(
    x: Any, ids: Any, codes: Any, scales: Any, shared: Any, format: str, **more: Any
) -> str | None:
    """Why no kernel runs, or None."""
    more |= dict(codes=codes, scales=scales)
    if are_many(ids):
        if format != "mxfp4" or codes.shape[-2] % TILE:
            return f"{format} with {codes.shape[-2]} rows, not mxfp4 with 16, 32, ..."
        return refusal_of_many(x, ids, shared, **more)
    if reason := refusal(x, ids, shared_codes=shared, **more):
        return reason
    w = rows_of(codes, scales, None, format)
    if w.format != "e2m1":
        return f"{format} has no kernel for experts in one launch"
    if w.columns <= w.group:
        return f"rows of {w.columns} columns are one group, whose lanes share its scale"
    return row_products.refusal(w)


def unsupported_hidden(
    x,
    ids,
    gate_codes,
    gate_scales,
    up_codes,
    up_scales,
    shared_codes,
    shared_scales,
    gate_bias,
    up_bias,
    *,
    format,
    **options,
) -> str | None:
    del options, up_scales, shared_scales
    more = dict(up_codes=up_codes, gate_bias=gate_bias, up_bias=up_bias)
    return refusal_of_rows(
        x, ids, gate_codes, gate_scales, shared_codes, format, **more
    )


def unsupported_sum(
    x,
    ids,
    weights,
    down_codes,
    down_scales,
    shared_codes,
    shared_scales,
    down_bias,
    residual,
    *,
    format,
) -> str | None:
    del shared_scales
    more = dict(weights=weights, down_bias=down_bias, residual=residual)
    return refusal_of_rows(
        x, ids, down_codes, down_scales, shared_codes, format, **more
    )


def problem_of(ids: jax.Array, codes: jax.Array, scales: jax.Array, format: str):
    w = rows_of(codes, scales, None, format)
    p = row_products.problem_of(w, 1, top_k=ids.shape[-1])
    return dataclasses.replace(p, experts=len(codes))


def zeros_of(p: RowProblem) -> jax.Array:
    """What is read in the place of activations that are not there."""
    return jnp.zeros(p.unit, jnp.bfloat16)


def microscaled_expert_hidden(
    x,
    ids,
    gate_codes,
    gate_scales,
    up_codes,
    up_scales,
    shared_codes,
    shared_scales,
    gate_bias,
    up_bias,
    *,
    format,
    alpha,
    limit,
    up_offset,
):
    """`[..., k, f]` of x `[..., d]`, ids `[..., k]` and experts `[e, 1, f, ...]`.

    Or `[e, 2, f, ...]`, which have those of up too.
    """
    if are_many(ids):
        up = None if up_codes is None else Packed.of_rows(up_codes, up_scales)
        return grouped_hidden(
            *(x, ids, Packed.of_rows(gate_codes, gate_scales), up, gate_bias, up_bias),
            **dict(alpha=alpha, limit=limit, up_offset=up_offset),
        )
    p = problem_of(ids, gate_codes, gate_scales, format)
    [y] = sparse_call(
        row_hidden_kernel,
        (-(-p.rows // 16), ids.size),
        {
            "x_ptr": x,
            "ids_ptr": ids.astype(jnp.int32),
            "gate_ptr": gate_codes,
            "gate_scales_ptr": gate_scales,
            "up_ptr": up_codes,
            "up_scales_ptr": up_scales,
            "shared_ptr": shared_codes,
            "shared_scales_ptr": shared_scales,
            "gate_bias_ptr": gate_bias,
            "up_bias_ptr": up_bias,
            "zeros_ptr": zeros_of(p),
        },
        {"y_ptr": jax.ShapeDtypeStruct((*ids.shape, p.rows), x.dtype)},
        {"P": p, "HALVES": gate_codes.shape[1], "ALPHA": alpha, "LIMIT": limit}
        | {"UP_OFFSET": up_offset, "num_warps": 2 * p.shares},
    )
    return y


def microscaled_expert_sum(
    x,
    ids,
    weights,
    down_codes,
    down_scales,
    shared_codes,
    shared_scales,
    down_bias,
    residual,
    *,
    format,
):
    """`[..., f]` of x `[..., k, d]`, ids and weights `[..., k]`."""
    if are_many(ids):
        down = Packed.of_rows(down_codes, down_scales)
        return grouped_sum(x, ids, weights, down, down_bias, residual)
    p = problem_of(ids, down_codes, down_scales, format)
    p = dataclasses.replace(p, shares=1)
    batches = p.turns * p.top_k
    few, many = OF_SUM
    shares = min(few if batches <= 4 * few else many, next_power_of_2(batches))
    lead = ids.shape[:-1]
    [y] = sparse_call(
        row_sum_kernel,
        (-(-p.rows // 16), math.prod(lead)),
        {
            "x_ptr": x,
            "ids_ptr": ids.astype(jnp.int32),
            "weights_ptr": weights,
            "down_ptr": down_codes,
            "down_scales_ptr": down_scales,
            "shared_ptr": shared_codes,
            "shared_scales_ptr": shared_scales,
            "bias_ptr": down_bias,
            "residual_ptr": residual,
            "zeros_ptr": zeros_of(p),
        },
        {"y_ptr": jax.ShapeDtypeStruct((*lead, p.rows), x.dtype)},
        {"P": p, "SHARES": shares, "num_warps": shares},
    )
    return y
