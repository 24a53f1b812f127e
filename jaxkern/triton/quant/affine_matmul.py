"""Products, rows and experts of MLX's affine format, by row_products.py."""

from jaxkern.triton.quant.row_decode import decoded
from jaxkern.triton.quant.row_problem import Rows
from jaxkern.triton.quant.row_products import (
    multiply,
    multiply_routed,
    refusal_of_product,
    refusal_of_routed,
    refusal_of_rows,
)


def rows_of(codes, scales, biases, bits, group_size) -> Rows:
    """One code a byte, or a stream of bits."""
    return Rows(
        codes,
        scales,
        biases,
        format="u8" if bits == 8 or codes.dtype.itemsize == 1 else f"u{bits}",
        columns=scales.shape[-1] * group_size,
        group=group_size,
        offset="bias",
    )


def unsupported(
    x, codes, scales, biases, *, bits, group_size, compute_dtype, dequant_dtype
) -> str | None:
    if dequant_dtype is not None:
        return f"dequant_dtype is {dequant_dtype}"
    w = rows_of(codes, scales, biases, bits, group_size)
    return refusal_of_product(x, w, compute_dtype)


def affine_matmul(
    x, codes, scales, biases, *, bits, group_size, compute_dtype, dequant_dtype
):
    del dequant_dtype
    w = rows_of(codes, scales, biases, bits, group_size)
    return multiply(x, w, compute_dtype)


def unsupported_embedding(
    ids, codes, scales, biases, *, bits, group_size, dtype
) -> str | None:
    w = rows_of(codes, scales, biases, bits, group_size)
    return refusal_of_rows(ids, w, dtype)


def affine_embedding(ids, codes, scales, biases, *, bits, group_size, dtype):
    return decoded(rows_of(codes, scales, biases, bits, group_size), dtype, ids)


def unsupported_id(
    x, ids, codes, scales, biases, *, bits, group_size, compute_dtype
) -> str | None:
    w = rows_of(codes, scales, biases, bits, group_size)
    return refusal_of_routed(x, ids, w, compute_dtype)


def affine_matmul_id(x, ids, codes, scales, biases, *, bits, group_size, compute_dtype):
    w = rows_of(codes, scales, biases, bits, group_size)
    return multiply_routed(x, ids, w, compute_dtype)
