"""Division and rounding whose bits a quantised format defines."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def divide(
    x: Float[Array, "*shape"], y: Float[Array, "..."] | float
) -> Float[Array, "*shape"]:
    """x / y, rounded once. XLA would multiply by 1 / y where y is one number."""
    return x / lax.optimization_barrier(y + jnp.zeros_like(x))


def multiply(
    x: Float[Array, "*shape"], y: Float[Array, "..."]
) -> Float[Array, "*shape"]:
    """x * y, rounded before anything is added: no fused multiply-add."""
    return lax.optimization_barrier(x * y)


def round_half_away(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """To the nearest integer, ties away from zero as C's roundf (`jnp.round`: even)."""
    return lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO)
