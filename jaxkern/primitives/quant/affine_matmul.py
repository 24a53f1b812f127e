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
from jaxtyping import Array, Float, UInt

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32
from jaxkern.primitives.quant.affine_tensor import (
    AffineTensor,
    affine_width,
    decode_affine,
    grouped_codes,
)
from jaxkern.primitives.quant.decoded_products import decoded_product
from jaxkern.primitives.quant.dequantize import DEQUANTIZE
from jaxkern.primitives.quant.quantized_embedding import QUANTIZED_EMBEDDING
from jaxkern.primitives.quant.quantized_family import QuantizedFamily
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

        w = scale * code + bias      of each group

    Args:
      w: `[..., d]`.
      dtype: float dtype of the result.
      dequant_dtype: dtype to which scale, bias, product and sum are rounded one by one;
        None computes in float32 and rounds once. mlx has here the dtype of the scales.

    Returns:
      `[..., d]`, `dtype`.

    Raises:
      TypeError: `w` is no AffineTensor.

    Example:
      >>> w = jaxkern.quantize_affine(jnp.arange(256.0), bits=8, group_size=256)
      >>> jaxkern.dequantize_affine(w, jnp.bfloat16)[:4]
      Array([0, 1, 2, 3], dtype=bfloat16)
    """
    options = {"dtype": jnp.dtype(dtype), "dequant_dtype": dtype_or_none(dequant_dtype)}
    return dequantize_affine_p(*AFFINE.read(w), **AFFINE.layout_of(w), **options)


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
    options = {
        "compute_dtype": dtype_or_none(compute_dtype),
        "dequant_dtype": dtype_or_none(dequant_dtype),
    }
    return affine_matmul_p(x, *AFFINE.read(w), **AFFINE.layout_of(w), **options)


def dtype_or_none(dtype: DTypeLike | None) -> jnp.dtype | None:
    return None if dtype is None else jnp.dtype(dtype)


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


AFFINE = QuantizedFamily(
    arrays={
        "codes": UInt[Array, "f words"],
        "scales": Float[Array, "f groups"],
        "biases": Float[Array, "f groups"],
    },
    layout=("bits", "group_size"),
    decode=decode_affine,
    width=lambda op, codes, scales, _, **layout: affine_width(
        op, codes, scales, **layout
    ),
    whole=("d", "words", "groups"),  # a group spans all three
)
ROUNDING = ("dequant_dtype",)  # what mlx rounds on the way to a weight

dequantize_affine_p = AFFINE.dequantize(
    "dequantize_affine", __name__, options=ROUNDING, bwd=dequantize_affine_bwd_reference
)
affine_matmul_p = AFFINE.matmul(
    "affine_matmul", __name__, options=ROUNDING, bwd=affine_matmul_bwd_reference
)
affine_embedding_p = AFFINE.embedding("affine_embedding", __name__)
affine_matmul_id_p = AFFINE.matmul_id("affine_matmul_id", __name__)

DEQUANTIZE[AffineTensor] = dequantize_affine
QUANTIZED_MATMUL[AffineTensor] = affine_matmul
QUANTIZED_EMBEDDING[AffineTensor] = AFFINE.reader(affine_embedding_p, "dtype")
QUANTIZED_MATMUL_ID[AffineTensor] = AFFINE.reader(affine_matmul_id_p, "compute_dtype")
