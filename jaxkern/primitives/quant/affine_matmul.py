"""What is computed with an `AffineTensor`: its weights, products, rows, experts.

    w = scale * code + bias,    dscale = sum over the group of code * dw,
                                dbias  = sum over the group of dw

The gradients are those of quantisation-aware training with frozen codes.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer, UInt

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.quant.affine_tensor import (
    AffineTensor,
    affine_width,
    decode_affine,
    grouped_codes,
)
from jaxkern.primitives.quant.decoded_products import (
    decoded_product,
    decoded_rows,
    routed_product,
    routed_product_transpose,
)
from jaxkern.primitives.quant.dequantize import DEQUANTIZE
from jaxkern.primitives.quant.quantized_embedding import QUANTIZED_EMBEDDING
from jaxkern.primitives.quant.quantized_matmul import QUANTIZED_MATMUL
from jaxkern.primitives.quant.quantized_matmul_id import QUANTIZED_MATMUL_ID


@check_arguments
def dequantize_affine(
    w: AffineTensor,
    dtype: DTypeLike = jnp.float32,
    *,
    dequant_dtype: DTypeLike | None = None,
) -> Float[Array, "... d"]:
    """The weights of an affine tensor, with gradients to its scales and biases.

    Args:
      w: `[..., d]`.
      dtype: float dtype of the result.
      dequant_dtype: dtype to which scale, bias, product and sum are rounded one by one;
        None computes in float32 and rounds once. mlx has here the dtype of the scales.

    Returns:
      `[..., d]`, `dtype`.

    Raises:
      TypeError: `w` is no AffineTensor.
    """
    return dequantize_affine_p(
        w.codes,
        w.scales,
        w.biases,
        bits=w.bits,
        group_size=w.group_size,
        dtype=jnp.dtype(dtype),
        dequant_dtype=dtype_or_none(dequant_dtype),
    )


def affine_matmul(
    x: Float[Array, "... d"],
    w: AffineTensor,
    compute_dtype: DTypeLike | None = None,
    *,
    dequant_dtype: DTypeLike | None = None,
) -> Float[Array, "... f"]:
    """`quantized_matmul` for an affine tensor, with gradients to all its floats.

    mlx-native is `compute_dtype=bfloat16, dequant_dtype=bfloat16`; see
    `dequantize_affine` for the latter.
    """
    return affine_matmul_p(
        x,
        w.codes,
        w.scales,
        w.biases,
        bits=w.bits,
        group_size=w.group_size,
        compute_dtype=dtype_or_none(compute_dtype),
        dequant_dtype=dtype_or_none(dequant_dtype),
    )


def affine_embedding(
    ids: Integer[Array, "..."], w: AffineTensor, dtype: jnp.dtype
) -> Float[Array, "... d"]:
    return affine_embedding_p(
        ids,
        w.codes,
        w.scales,
        w.biases,
        bits=w.bits,
        group_size=w.group_size,
        dtype=dtype,
    )


def affine_matmul_id(
    x: Float[Array, "t d"],
    ids: Integer[Array, "t k"],
    w: AffineTensor,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "t k f"]:
    return affine_matmul_id_p(
        x,
        ids,
        w.codes,
        w.scales,
        w.biases,
        bits=w.bits,
        group_size=w.group_size,
        compute_dtype=compute_dtype,
    )


def dtype_or_none(dtype: DTypeLike | None) -> jnp.dtype | None:
    return None if dtype is None else jnp.dtype(dtype)


def dequantize_affine_reference(
    codes: UInt[Array, "... words"],
    scales: Float[Array, "... groups"],
    biases: Float[Array, "... groups"],
    *,
    bits: int,
    group_size: int,
    dtype: jnp.dtype | None,
    dequant_dtype: jnp.dtype | None,
) -> Float[Array, "... d"]:
    affine_width("dequantize_affine", codes, scales, bits, group_size)
    return decode_affine(
        codes,
        scales,
        biases,
        bits=bits,
        group_size=group_size,
        dtype=dtype,
        dequant_dtype=dequant_dtype,
    )


def dequantize_affine_bwd_reference(
    codes: UInt[Array, "... words"],
    scales: Float[Array, "... groups"],
    dy: Float[Array, "... d"],
    *,
    bits: int,
    group_size: int,
    dtype: jnp.dtype | None,
    dequant_dtype: jnp.dtype | None,
) -> tuple[Float[Array, "... groups"], Float[Array, "... groups"]]:
    del dtype, dequant_dtype  # rounding passes the gradient through
    return _group_gradients(dy, codes, scales, bits, group_size)


def affine_matmul_reference(
    x: Float[Array, "... d"],
    codes: UInt[Array, "f words"],
    scales: Float[Array, "f groups"],
    biases: Float[Array, "f groups"],
    *,
    bits: int,
    group_size: int,
    compute_dtype: jnp.dtype | None,
    dequant_dtype: jnp.dtype | None,
) -> Float[Array, "... f"]:
    _check_width("affine_matmul", x, codes, scales, bits, group_size)
    decode = functools.partial(
        decode_affine, bits=bits, group_size=group_size, dequant_dtype=dequant_dtype
    )
    return decoded_product(x, (codes, scales, biases), decode, 1, compute_dtype)


def affine_matmul_bwd_reference(
    x: Float[Array, "... d"],
    codes: UInt[Array, "f words"],
    scales: Float[Array, "f groups"],
    biases: Float[Array, "f groups"],
    dy: Float[Array, "... f"],
    *,
    bits: int,
    group_size: int,
    compute_dtype: jnp.dtype | None,
    dequant_dtype: jnp.dtype | None,
) -> tuple[Float[Array, "... d"], Float[Array, "f groups"], Float[Array, "f groups"]]:
    decode = functools.partial(
        decode_affine, bits=bits, group_size=group_size, dequant_dtype=dequant_dtype
    )
    dx = decoded_product(dy, (codes, scales, biases), decode, 0, compute_dtype)
    lead = tuple(range(x.ndim - 1))
    cut = jax.typeof(scales).sharding
    dw = lax.dot_general(
        at_least_f32(dy),
        at_least_f32(x),
        ((lead, lead), ((), ())),
        precision=lax.Precision.HIGHEST,
        # the sum over tokens that are cut: say how its result is
        out_sharding=P(cut.spec[0], None) if cut.mesh.explicit_axes else None,
    )
    return dx, *_group_gradients(dw, codes, scales, bits, group_size)


def affine_embedding_reference(
    ids: Integer[Array, "..."],
    codes: UInt[Array, "v words"],
    scales: Float[Array, "v groups"],
    biases: Float[Array, "v groups"],
    *,
    bits: int,
    group_size: int,
    dtype: jnp.dtype | None,
) -> Float[Array, "... d"]:
    affine_width("affine_embedding", codes, scales, bits, group_size)
    decode = functools.partial(decode_affine, bits=bits, group_size=group_size)
    return decoded_rows(ids, (codes, scales, biases), decode, dtype)


def affine_matmul_id_reference(
    x: Float[Array, "... d"],
    ids: Integer[Array, "... k"],
    codes: UInt[Array, "e f words"],
    scales: Float[Array, "e f groups"],
    biases: Float[Array, "e f groups"],
    *,
    bits: int,
    group_size: int,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "... k f"]:
    _check_width("affine_matmul_id", x, codes, scales, bits, group_size)
    decode = functools.partial(decode_affine, bits=bits, group_size=group_size)
    return routed_product(x, ids, (codes, scales, biases), decode, compute_dtype)


def affine_matmul_id_bwd_reference(
    ids: Integer[Array, "... k"],
    codes: UInt[Array, "e f words"],
    scales: Float[Array, "e f groups"],
    biases: Float[Array, "e f groups"],
    dy: Float[Array, "... k f"],
    *,
    bits: int,
    group_size: int,
    compute_dtype: jnp.dtype | None,
) -> Float[Array, "... d"]:
    decode = functools.partial(decode_affine, bits=bits, group_size=group_size)
    arrays = (codes, scales, biases)
    return routed_product_transpose(dy, ids, arrays, decode, compute_dtype)


def _check_width(op, x, codes, scales, bits, group_size) -> None:
    d = affine_width(op, codes, scales, bits, group_size)
    if x.shape[-1] != d:
        raise TypeError(f"{op}: dim `d` is {x.shape[-1]} in `x` but {d} in `w`.")


def _group_gradients(
    dw: Float[Array, "... d"],
    codes: UInt[Array, "... words"],
    scales: Float[Array, "... groups"],
    bits: int,
    group_size: int,
) -> tuple[Float[Array, "... groups"], Float[Array, "... groups"]]:
    """(dscales, dbiases) of the gradient of the weights."""
    code = grouped_codes(codes, bits, group_size)
    wide = jnp.promote_types(at_least_f32(dw).dtype, scales.dtype)
    dw = dw.astype(wide).reshape(code.shape)
    dscales = jnp.sum(dw * code.astype(wide), axis=-1)
    return dscales.astype(scales.dtype), jnp.sum(dw, axis=-1).astype(scales.dtype)


WHOLE = ("d", "words", "groups")  # a group spans all three

dequantize_affine_p = kernel_primitive(
    dequantize_affine_reference,
    bwd=dequantize_affine_bwd_reference,
    replicated=WHOLE,
)
affine_matmul_p = kernel_primitive(
    affine_matmul_reference, bwd=affine_matmul_bwd_reference, replicated=WHOLE
)
affine_embedding_p = kernel_primitive(
    affine_embedding_reference,
    replicated=("v", *WHOLE),  # an id may name any row
)
affine_matmul_id_p = kernel_primitive(
    affine_matmul_id_reference,
    bwd=affine_matmul_id_bwd_reference,
    linear=("x",),
    replicated=("e", "k", *WHOLE),  # an id may name any expert
)

DEQUANTIZE[AffineTensor] = dequantize_affine
QUANTIZED_MATMUL[AffineTensor] = affine_matmul
QUANTIZED_EMBEDDING[AffineTensor] = affine_embedding
QUANTIZED_MATMUL_ID[AffineTensor] = affine_matmul_id
