"""MLX's affine format in the fused kernels of jax-mps: w = scale * code + bias.

Like `fused.py`, which has the call. jax-mps hands operands and options to MLX as they
come; MLX has kernels for every width and group of `CODES`, in float32, float16 and
bfloat16, and wants matrices. In float32 the kernels compute what the references do.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkern.lowering.apple.fused import call, refusal
from jaxkern.primitives.quant.affine_tensor import BITS
from jaxkern.primitives.quant.decoded_products import decoded_rows, routed

CODES = {"bits": BITS, "group_size": (32, 64, 128)}


def matrix(a: jax.Array) -> jax.Array:
    return a.reshape(-1, a.shape[-1])


def quantize(w, *, bits, group_size, quantizer, packed):
    del quantizer, packed  # refused
    *lead, d = w.shape
    rows = matrix(w).astype(jnp.float32)
    words = jax.ShapeDtypeStruct((rows.shape[0], d * bits // 32), jnp.uint32)
    groups = jax.ShapeDtypeStruct((rows.shape[0], d // group_size), jnp.float32)
    made = call(
        "quantize", (words, groups, groups), rows, group_size=group_size, bits=bits
    )
    codes, scales, biases = (a.reshape(*lead, a.shape[-1]) for a in made)
    return codes, scales.astype(w.dtype), biases.astype(w.dtype)


def unsupported_quantize(w, *, bits, group_size, quantizer, packed):
    if quantizer != "mlx" or not packed:
        return "it has MLX's quantiser and packed codes only"
    return affine_refusal(bits, group_size, w)


def dequantize(codes, scales, biases, *, bits, group_size, dtype, dequant_dtype=None):
    del dequant_dtype  # refused
    groups = [matrix(a).astype(jnp.float32) for a in (scales, biases)]
    rows, d = groups[0].shape[0], scales.shape[-1] * group_size
    y = call(
        "dequantize",
        jax.ShapeDtypeStruct((rows, d), jnp.float32),
        matrix(codes),
        *groups,
        group_size=group_size,
        bits=bits,
    )
    y = y.reshape(*codes.shape[:-1], d)
    return y if dtype is None else y.astype(dtype)


def unsupported_dequantize(
    codes, scales, biases, *, bits, group_size, dtype, dequant_dtype
):
    del dtype
    if dequant_dtype is not None:
        return ROUNDS_ITSELF
    return affine_refusal(bits, group_size, codes, scales, biases)


def embedding(ids, codes, scales, biases, *, bits, group_size, dtype):
    decode = functools.partial(dequantize, bits=bits, group_size=group_size)
    return decoded_rows(ids, (codes, scales, biases), decode, dtype)


def unsupported_embedding(ids, codes, scales, biases, *, bits, group_size, dtype):
    del dtype
    return affine_refusal(bits, group_size, ids, codes, scales, biases)


def quantized_matmul(
    x, codes, scales, biases, *, bits, group_size, compute_dtype, dequant_dtype=None
):
    del dequant_dtype  # refused
    options = dict(bits=bits, group_size=group_size, dtype=compute_dtype)
    y = product(matrix(x), (codes, scales, biases), **options)
    return y.reshape(*x.shape[:-1], codes.shape[0]).astype(x.dtype)


def product(
    rows: jax.Array, arrays: Sequence[jax.Array], *, bits: int, group_size: int, dtype
) -> jax.Array:
    """y `[..., n, f]` of rows `[..., n, d]` and codes `[..., f, words]`, in `dtype`."""
    codes, scales, biases = arrays
    dtype = dtype or jnp.float32
    rows, scales, biases = (a.astype(dtype) for a in (rows, scales, biases))
    return call(
        "quantized_matmul",
        jax.ShapeDtypeStruct((*rows.shape[:-1], codes.shape[-2]), dtype),
        rows,
        codes,
        scales,
        biases,
        transpose=1,  # w is [f, d]
        group_size=group_size,
        bits=bits,
    )


def unsupported_quantized_matmul(
    x, codes, scales, biases, *, bits, group_size, compute_dtype, dequant_dtype=None
):
    if dequant_dtype is not None:
        return ROUNDS_ITSELF
    return product_refusal(x, scales, biases, compute_dtype) or affine_refusal(
        bits, group_size, x, codes, scales, biases
    )


def quantized_matmul_id(
    x, ids, codes, scales, biases, *, bits, group_size, compute_dtype
):
    options = dict(bits=bits, group_size=group_size, dtype=compute_dtype)
    k, f = ids.shape[-1], codes.shape[-2]

    def of_its_rows(*experts):  # [... k f words]: a batch of products with one row
        batch = [a.reshape(-1, *a.shape[-2:]) for a in experts]
        rows = jnp.repeat(matrix(x), k, axis=0)[:, None]
        return product(rows, batch, **options).reshape(*ids.shape, f)

    def of_all(*expert):
        return product(matrix(x), expert, **options).reshape(*x.shape[:-1], f)

    return routed(ids, (codes, scales, biases), of_its_rows, of_all).astype(x.dtype)


def unsupported_quantized_matmul_id(
    x, ids, codes, scales, biases, *, bits, group_size, compute_dtype
):
    return product_refusal(x, scales, biases, compute_dtype) or affine_refusal(
        bits, group_size, x, ids, codes, scales, biases
    )


ROUNDS_ITSELF = "it rounds weights as it likes"


def product_refusal(x: Any, scales: Any, biases: Any, compute_dtype: Any) -> str | None:
    """Why a product in `compute_dtype` is another one there."""
    if compute_dtype == jnp.int8:
        return "it rounds no activations to 8 bits"
    dtype = jnp.dtype(compute_dtype or jnp.float32)
    if dtype not in (jnp.dtype(jnp.float32), x.dtype):
        return "its result has the dtype of the factors: it would be rounded twice"
    if any(jnp.promote_types(a.dtype, dtype) != dtype for a in (scales, biases)):
        return f"it computes in {dtype}, to which the scales would be rounded"
    return None


def affine_refusal(bits: int, group_size: int, *operands: Any) -> str | None:
    if bits not in CODES["bits"] or group_size not in CODES["group_size"]:
        return f"it has {CODES}, not {bits} bits in groups of {group_size}"
    if any(x.dtype == jnp.uint8 for x in operands):
        return "codes are not packed in 32-bit words"
    return refusal(*operands)
