"""Quantisation of vectors: x = scale * level(code), per vector and group of dims.

TurboQuant (https://arxiv.org/abs/2504.19874, its first variant, which has the least
squared error) rotates first; plain integers do not.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.turboquant.fwht import hadamard_product
from jaxkern.primitives.turboquant.quantized_vectors import (
    QuantizedVectors,
    check_quantized_vectors,
)
from jaxkern.primitives.turboquant.vector_codec import (
    TurboQuantCodec,
    VectorCodec,
    decode,
    encode,
)


@check_arguments
def quantize_vectors(x: Float[Array, "... d"], codec: VectorCodec) -> QuantizedVectors:
    """Quantises each vector along its last dim.

        code = the level that is nearest to x / scale      of each group of dims

    The codec says what scale, levels and groups are: see `IntCodec`, `Float8Codec` and
    `TurboQuantCodec`.

    A vector of zeros has scales of 0 and comes back as zeros. The scales are
    differentiable, the codes are not: see `quantize_straight_through`.

    Source: https://arxiv.org/abs/2504.19874.

    Args:
      x: `[..., d]`, any float dtype. For a TurboQuantCodec d is a power of two.
      codec: IntCodec, Float8Codec or TurboQuantCodec.

    Returns:
      QuantizedVectors of shape `[..., d]` with float32 scales.

    Raises:
      TypeError: the codec does not fit d dims.

    Example:
      >>> x = jnp.array([[1.0, -0.5, 0.25, 0.75]])
      >>> y = jaxkern.quantize_vectors(x, jaxkern.IntCodec(8))
      >>> y.codes.shape, y.scales.shape
      ((1, 4), (1, 1))
      >>> jaxkern.dequantize_vectors(y)
      Array([[ 1.   , -0.504,  0.252,  0.748]], dtype=float32)
    """
    codes, scales = quantize_vectors_p(x, codec=codec)
    return QuantizedVectors(codes, scales, codec)


@check_arguments
def dequantize_vectors(
    x: QuantizedVectors, *, unrotate: bool = True, dtype: DTypeLike | None = None
) -> Float[Array, "... d"]:
    """The vectors that the codes stand for.

        x = scale * level(code)      of each group of dims

    For a TurboQuantCodec that is the rotated x, which is then rotated back.

    Args:
      x: `[..., d]`.
      unrotate: False leaves the vectors of a TurboQuantCodec in the rotated domain,
        where `rotate(query)` meets them with the same inner products.
      dtype: of the result; float32 unless given.

    Returns:
      `[..., d]`, computed in float32 and rounded once.

    Raises:
      TypeError: `x` is no well-formed QuantizedVectors.

    Example:
      >>> x = jnp.array([[1.0, -0.5, 0.25, 0.75]])
      >>> y = jaxkern.quantize_vectors(x, jaxkern.IntCodec(4))
      >>> jaxkern.dequantize_vectors(y)
      Array([[ 1.   , -0.429,  0.286,  0.714]], dtype=float32)
    """
    check_quantized_vectors("dequantize_vectors", "x", x)
    return dequantize_vectors_p(
        x.codes,
        x.scales,
        codec=x.codec,
        unrotate=unrotate,
        dtype=None if dtype is None else jnp.dtype(dtype),
    )


@check_arguments
def turboquant_encode(
    x: Float[Array, "... d"],
    bits: float = 4,
    *,
    group: int | None = 256,
    seed: int | None = None,
    codebook: tuple[float, ...] | None = None,
) -> QuantizedVectors:
    """`quantize_vectors` with a TurboQuantCodec (https://arxiv.org/abs/2504.19874).

    Args:
      x: `[..., d]`, any float dtype, d a power of two.
      bits, group, seed, codebook: see `TurboQuantCodec`.

    Returns:
      QuantizedVectors of shape `[..., d]` with float32 scales.

    Raises:
      TypeError: the codec does not fit d dims.
      ValueError: there is no such codec.

    Example:
      >>> x = jnp.array([[1.0, -0.5, 0.25, 0.75]])
      >>> y = jaxkern.turboquant_encode(x, 4)
      >>> y.codes.shape, y.scales.shape  # two codes a byte
      ((1, 2), (1, 1))
    """
    return quantize_vectors(x, TurboQuantCodec(bits, group, seed, codebook))


@check_arguments
def turboquant_decode(
    x: QuantizedVectors, *, unrotate: bool = True, dtype: DTypeLike | None = None
) -> Float[Array, "... d"]:
    """The inverse of `turboquant_encode` up to its error.

    Args:
      x, unrotate, dtype: see `dequantize_vectors`.

    Returns:
      `[..., d]`, computed in float32 and rounded once.

    Raises:
      TypeError: `x` is no well-formed QuantizedVectors.

    Example:
      >>> x = jnp.array([[1.0, -0.5, 0.25, 0.75]])
      >>> y = jaxkern.turboquant_encode(x, 8)
      >>> jaxkern.turboquant_decode(y)
      Array([[ 1.005, -0.505,  0.261,  0.749]], dtype=float32)
    """
    return dequantize_vectors(x, unrotate=unrotate, dtype=dtype)


@check_arguments
def quantize_straight_through(
    x: Float[Array, "... d"], codec: VectorCodec
) -> Float[Array, "... d"]:
    """x as it comes back from the codec; its gradient is that of the identity.

    For training against a quantised cache (https://arxiv.org/abs/1308.3432).

    Args:
      x: `[..., d]`, any float dtype.
      codec: IntCodec, Float8Codec or TurboQuantCodec.

    Returns:
      `[..., d]`, dtype of x.

    Raises:
      TypeError: the codec does not fit d dims.

    Example:
      >>> x, codec = jnp.array([1.0, -0.4, 0.3, 0.0]), jaxkern.IntCodec(2)
      >>> jaxkern.quantize_straight_through(x, codec)
      Array([1., 0., 0., 0.], dtype=float32)
      >>> jax.grad(lambda x: jaxkern.quantize_straight_through(x, codec).sum())(x)
      Array([1., 1., 1., 1.], dtype=float32)
    """
    y = dequantize_vectors(quantize_vectors(x, codec), dtype=x.dtype)
    return jax.lax.stop_gradient(y) + (x - jax.lax.stop_gradient(x))


def quantize_vectors_reference(
    x: Float[Array, "... d"], *, codec: VectorCodec
) -> tuple[UInt8[Array, "... code_bytes"], Float[Array, "... groups"]]:
    return encode("quantize_vectors", x, codec)


def dequantize_vectors_reference(
    codes: UInt8[Array, "... code_bytes"],
    scales: Float[Array, "... groups"],
    *,
    codec: VectorCodec,
    unrotate: bool,
    dtype: jnp.dtype | None,
) -> Float[Array, "... d"]:
    x = decode("dequantize_vectors", codes, scales, codec)
    signs = codec.signs(x.shape[-1])
    if unrotate and signs is not None:
        x = hadamard_product(x) * signs
    return x.astype(dtype or x.dtype)


quantize_vectors_p = kernel_primitive(
    quantize_vectors_reference,
    replicated=("d", "code_bytes", "groups"),  # the rotation mixes all of d
)
dequantize_vectors_p = kernel_primitive(
    dequantize_vectors_reference,
    replicated=("d", "code_bytes", "groups"),
)
