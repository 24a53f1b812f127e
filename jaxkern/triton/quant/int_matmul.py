"""Weights, products, rows, experts of integers of 4 and 8 bits, by row_products.py."""

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


def rows_of(codes, scales, zeros, bits, group_size, signed) -> Rows:
    """Unsigned codes without zeros have theirs in the middle."""
    return Rows(
        codes,
        scales,
        zeros,
        format=f"{'i' if signed else 'u'}{bits}",
        columns=codes.shape[-1] * 8 // bits,
        group=group_size,
        offset="" if zeros is None else "zero",
        zero=0 if signed or zeros is not None else 2 ** (bits - 1),
    )


def unsupported_weights(
    codes, scales, zeros, *, bits, group_size, signed, dtype
) -> str | None:
    w = rows_of(codes, scales, zeros, bits, group_size, signed)
    return refusal_of_weights(w, dtype)


def dequantize_int(codes, scales, zeros, *, bits, group_size, signed, dtype):
    return all_decoded(rows_of(codes, scales, zeros, bits, group_size, signed), dtype)


def unsupported(
    x, codes, scales, zeros, *, bits, group_size, signed, compute_dtype
) -> str | None:
    w = rows_of(codes, scales, zeros, bits, group_size, signed)
    return refusal_of_product(x, w, compute_dtype)


def int_matmul(x, codes, scales, zeros, *, bits, group_size, signed, compute_dtype):
    w = rows_of(codes, scales, zeros, bits, group_size, signed)
    return multiply(x, w, compute_dtype)


def unsupported_embedding(
    ids, codes, scales, zeros, *, bits, group_size, signed, dtype
) -> str | None:
    w = rows_of(codes, scales, zeros, bits, group_size, signed)
    return refusal_of_rows(ids, w, dtype)


def int_embedding(ids, codes, scales, zeros, *, bits, group_size, signed, dtype):
    return decoded(rows_of(codes, scales, zeros, bits, group_size, signed), dtype, ids)


def unsupported_id(
    x, ids, codes, scales, zeros, *, bits, group_size, signed, compute_dtype
) -> str | None:
    w = rows_of(codes, scales, zeros, bits, group_size, signed)
    return refusal_of_routed(x, ids, w, compute_dtype)


def int_matmul_id(
    x, ids, codes, scales, zeros, *, bits, group_size, signed, compute_dtype
):
    w = rows_of(codes, scales, zeros, bits, group_size, signed)
    return multiply_routed(x, ids, w, compute_dtype)
