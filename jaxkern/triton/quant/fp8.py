"""Products and rows of 8-bit floats with block scales, by row_products.py."""

from jaxkern.triton.quant.row_decode import decoded
from jaxkern.triton.quant.row_problem import Rows
from jaxkern.triton.quant.row_products import (
    multiply,
    refusal_of_product,
    refusal_of_rows,
)


def rows_of(codes, scales, rows_of_scale) -> Rows:
    columns = codes.shape[-1]
    return Rows(
        codes,
        scales,
        None,
        format="e4m3",
        columns=columns,
        group=columns // max(scales.shape[-1], 1),
        rows_of_scale=rows_of_scale,
    )


def refused_format(format: str) -> str | None:
    return None if format == "e4m3fn" else f"{format} has no kernel, only e4m3fn"


def unsupported(x, codes, scales, *, format, compute_dtype) -> str | None:
    if reason := refused_format(format):
        return reason
    w = rows_of(codes, scales, codes.shape[0] // max(scales.shape[0], 1))
    return refusal_of_product(x, w, compute_dtype)


def fp8_matmul(x, codes, scales, *, format, compute_dtype):
    del format
    w = rows_of(codes, scales, codes.shape[0] // scales.shape[0])
    return multiply(x, w, compute_dtype)


def unsupported_embedding(ids, codes, scales, *, format, dtype) -> str | None:
    if reason := refused_format(format):
        return reason
    return refusal_of_rows(ids, rows_of(codes, scales, 1), dtype)


def fp8_embedding(ids, codes, scales, *, format, dtype):
    """Each row has scales of its own here."""
    del format
    return decoded(rows_of(codes, scales, 1), dtype, ids)
