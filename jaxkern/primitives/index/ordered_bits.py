"""Floats as integers of the same order: what is compared by bits or sorted by radix."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def ordered_bits(x: Float[Array, "..."]) -> Array:
    """Signed integers in the order of the floats; -0.0 lies just below 0.0.

    All bits of a negative number but its sign flip. NaN lies beyond the infinities, on
    the side of its sign.
    """
    bits = lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
    return bits ^ ((bits < 0) * jnp.iinfo(bits.dtype).max)


def from_ordered_bits(bits: Array, dtype) -> Float[Array, "..."]:
    bits = bits ^ ((bits < 0) * jnp.iinfo(bits.dtype).max)
    return lax.bitcast_convert_type(bits, dtype)
