"""Whole tensors as 8-bit floats with one scale, for products that XLA makes in fp8.

    scale = 2**e, the least power of two with max|x| <= largest value * scale
    codes = float8(x / scale)

Current scaling: the largest value is that of the tensor itself, over all devices where
it is cut. A power of two moves no digit and costs at most one of the 15 (e4m3fn) or 30
(e5m2) binades below the largest value; codes times scale is exact in bfloat16.

Codes are kept as uint8 with the bits of the 8-bit dtype. Apple's plugins, which have
none, read and write them by their bits.

A tensor of zeros has scale 1. Where one element is infinite or NaN the scale is NaN,
and with it every result of a product: a training step then updates nothing.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxkern.primitives.call import same_manual_axes
from jaxkern.primitives.float8 import (
    FLOAT8,
    decode_float8,
    encode_float8,
    largest_float8,
)

OPERANDS, GRADIENTS = "e4m3fn", "e5m2"
WITHOUT = ("mps", "mtl", "METAL")  # platforms that have no dtypes of 8 bits
LEAST = -110  # exponent of a scale: codes of any size times it are normal in float32


def scale_of(
    x: Float[Array, "..."], form: str, axis: int | None = None
) -> Float[Array, "..."]:
    """The scale in float32: of all of x, or of each row along an axis."""
    fraction, exponent = math.frexp(largest_float8(form))
    largest = jnp.max(jnp.abs(x), axis=axis, initial=0).astype(jnp.float32)
    # carries into the exponent where the digits are larger than those of the format
    beyond = 2**23 - 1 - int((2 * fraction - 1) * 2**23)
    bits = lax.bitcast_convert_type(largest, jnp.int32) + beyond
    power = jnp.maximum((bits >> 23) - 127 - (exponent - 1), LEAST)
    scale = lax.bitcast_convert_type((power + 127) << 23, jnp.float32)
    scale = jnp.where(largest > 0, scale, 1)
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


def codes_of(
    x: Float[Array, "..."], scale: Float[Array, "..."], form: str
) -> UInt8[Array, "..."]:
    """float8(x / scale), for what is in range."""

    def by_dtype(x):
        codes = lax.bitcast_convert_type(x.astype(FLOAT8[form]), jnp.uint8)
        # XLA on GPUs drops a conversion that another one takes back
        return lax.optimization_barrier(codes)

    def by_bits(x):
        return same_manual_axes([encode_float8(x, form), x])[0]

    wide = jnp.promote_types(x.dtype, jnp.float32)
    small = x.astype(wide) * (1 / scale.astype(wide))
    without = dict.fromkeys(WITHOUT, by_bits)
    return lax.platform_dependent(small, default=by_dtype, **without)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def standing_for(
    x: Float[Array, "..."],
    codes: UInt8[Array, "..."],
    scale: Float[Array, ""],
    form: str,
    dtype: DTypeLike,
) -> Float[Array, "..."]:
    """codes * scale in `dtype`, with the derivative of x: straight-through."""

    def by_dtype(codes):
        return lax.bitcast_convert_type(codes, FLOAT8[form]).astype(dtype)

    def by_bits(codes):
        values = decode_float8(codes, form).astype(dtype)
        return same_manual_axes([values, codes])[0]  # jax 0.11 forgets of empty ones

    without = dict.fromkeys(WITHOUT, by_bits)
    values = lax.platform_dependent(codes, default=by_dtype, **without)
    return values * scale.astype(dtype)


@standing_for.defjvp
def _(form, dtype, primals, tangents):
    return standing_for(*primals, form, dtype), tangents[0].astype(dtype)


def rounded(
    x: Float[Array, "..."], form: str, num_maps: int = 0
) -> Float[Array, "..."]:
    """x rounded to 8 bits, straight-through; examples of the first axes each alone."""

    def whole(x):
        fixed = lax.stop_gradient(x)
        scale = scale_of(fixed, form)
        return standing_for(x, codes_of(fixed, scale, form), scale, form, x.dtype)

    for _ in range(num_maps):
        whole = jax.vmap(whole)
    return whole(x)


# The identity, whose transpose rounds the cotangent. `num_maps` axes in front count
# examples of a vmap.
rounded_gradient_p = Primitive("rounded_gradient")
rounded_gradient_p.def_impl(lambda y, *, num_maps: y)
rounded_gradient_p.def_abstract_eval(lambda y, *, num_maps: y)
mlir.register_lowering(rounded_gradient_p, lambda ctx, y, *, num_maps: [y])
ad.deflinear2(
    rounded_gradient_p,
    lambda ct, y, *, num_maps: [rounded(ct, GRADIENTS, num_maps)],
)


def _batch(args, axes, *, num_maps):
    y = jnp.moveaxis(args[0], axes[0], 0)
    return rounded_gradient_p.bind(y, num_maps=num_maps + 1), 0


batching.primitive_batchers[rounded_gradient_p] = _batch


def rounded_gradient(y: Float[Array, "..."], num_maps: int = 0) -> Float[Array, "..."]:
    """y; what a reverse pass brings back to it is rounded to e5m2.

    With one scale, or with one for each index of the first `num_maps` axes.
    """
    return rounded_gradient_p.bind(y, num_maps=num_maps)
