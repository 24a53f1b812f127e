"""Weights, products, rows and experts of MXFP4, NVFP4 and MXFP8, by row_products.py."""

from jaxkern.primitives.quant.microscaled_tensor import MICROSCALED
from jaxkern.triton.quant.row_decode import all_decoded, decoded
from jaxkern.triton.quant.row_problem import Rows
from jaxkern.triton.quant.row_products import (
    multiply,
    multiply_routed,
    refusal_of_product,
    refusal_of_routed,
    refusal_of_rows,
    refusal_of_weights,
)


def rows_of(codes, scales, global_scale, format) -> Rows:
    form = MICROSCALED[format]
    return Rows(
        codes,
        scales,
        None,
        format="e2m1" if form.bits == 4 else "e4m3",
        columns=scales.shape[-1] * form.group_size,
        group=form.group_size,
        factors=global_scale,
        kind="e8m0" if form.scale == "e8m0" else "e4m3",
    )


def unsupported_weights(codes, scales, global_scale, *, format, dtype) -> str | None:
    return refusal_of_weights(rows_of(codes, scales, global_scale, format), dtype)


def dequantize_microscaled(codes, scales, global_scale, *, format, dtype):
    return all_decoded(rows_of(codes, scales, global_scale, format), dtype)


def unsupported(x, codes, scales, global_scale, *, format, compute_dtype) -> str | None:
    w = rows_of(codes, scales, global_scale, format)
    return refusal_of_product(x, w, compute_dtype)


def microscaled_matmul(x, codes, scales, global_scale, *, format, compute_dtype):
    return multiply(x, rows_of(codes, scales, global_scale, format), compute_dtype)


def unsupported_embedding(
    ids, codes, scales, global_scale, *, format, dtype
) -> str | None:
    w = rows_of(codes, scales, global_scale, format)
    return refusal_of_rows(ids, w, dtype)


def microscaled_embedding(ids, codes, scales, global_scale, *, format, dtype):
    return decoded(rows_of(codes, scales, global_scale, format), dtype, ids)


def unsupported_id(
    x, ids, codes, scales, global_scale, *, format, compute_dtype
) -> str | None:
    if global_scale is not None:
        return "experts have a `global_scale` each"
    w = rows_of(codes, scales, None, format)
    return refusal_of_routed(x, ids, w, compute_dtype)


def microscaled_matmul_id(
    x, ids, codes, scales, global_scale, *, format, compute_dtype
):
    w = rows_of(codes, scales, global_scale, format)
    return multiply_routed(x, ids, w, compute_dtype)
