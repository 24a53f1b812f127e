"""Whole tensors as 8-bit floats with one scale, for products that XLA makes in fp8.

    scale = 2**e, the least power of two with max|x| <= largest value * scale
    codes = float8(x / scale)

Current scaling: the largest value is that of the tensor itself, over all devices where
it is cut. A power of two moves no digit and costs at most one of the 15 (e4m3fn) or 30
(e5m2) binades below the largest value; codes times scale is exact in bfloat16.

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
from jaxtyping import Array, Float

OPERANDS = jnp.float8_e4m3fn
GRADIENTS = jnp.float8_e5m2
LEAST = -110  # exponent of a scale: codes of any size times it are normal in float32


def scale_of(x: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, ""]:
    """The scale in float32."""
    fraction, exponent = math.frexp(float(jnp.finfo(dtype).max))
    largest = jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)
    # carries into the exponent where the digits are larger than those of the format
    beyond = 2**23 - 1 - int((2 * fraction - 1) * 2**23)
    bits = lax.bitcast_convert_type(largest, jnp.int32) + beyond
    power = jnp.maximum((bits >> 23) - 127 - (exponent - 1), LEAST)
    scale = lax.bitcast_convert_type((power + 127) << 23, jnp.float32)
    scale = jnp.where(largest > 0, scale, 1)
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


def encoded(x: Float[Array, "..."], dtype: DTypeLike) -> tuple[Array, Array]:
    """Codes and scale; constants of differentiation."""
    x = lax.stop_gradient(x)
    scale = scale_of(x, dtype)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * (1 / scale)).astype(dtype), scale


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def standing_for(
    x: Float[Array, "..."], codes: Array, scale: Float[Array, ""], dtype: DTypeLike
) -> Float[Array, "..."]:
    """codes * scale in `dtype`, with the derivative of x: straight-through."""
    return codes.astype(dtype) * scale.astype(dtype)


@standing_for.defjvp
def _(dtype, primals, tangents):
    return standing_for(*primals, dtype), tangents[0].astype(dtype)


def rounded(
    x: Float[Array, "..."], dtype: DTypeLike, num_maps: int = 0
) -> Float[Array, "..."]:
    """x rounded to 8 bits, straight-through; examples of the first axes each alone."""

    def whole(x):
        return standing_for(x, *encoded(x, dtype), x.dtype)

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


def rounded_gradient(y: Float[Array, "..."]) -> Float[Array, "..."]:
    """y; what a reverse pass brings back to it is rounded to e5m2 with one scale."""
    return rounded_gradient_p.bind(y, num_maps=0)
