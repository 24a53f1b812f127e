"""GELU: y = x * Phi(x), Phi the normal distribution function  (https://arxiv.org/abs/1606.08415)."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def gelu(x: Float[Array, "..."], *, approximate: str = "tanh") -> Float[Array, "..."]:
    """Gaussian error linear unit (https://arxiv.org/abs/1606.08415).

        "none":  y = x * Phi(x),  Phi the normal distribution function
        "tanh":  y = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x**3)))

    Computed in float32 and rounded once; only x is kept for the backward pass. The
    factor beside x is evaluated without cancellation, so that negative x keep their
    relative accuracy where `1 + tanh` of `jax.nn.gelu` loses it. gelu(-inf) is NaN, as
    there; NaN propagates.

    Args:
      x: `[...]`, any float dtype.
      approximate: "tanh" or "none". PyTorch's names; `jax.nn.gelu` has a bool.

    Returns:
      y: shape and dtype of x.

    Raises:
      ValueError: `approximate` is neither of the two.

    Example:
      >>> x = jnp.array([-1.0, 0.0, 1.0])
      >>> jaxkern.gelu(x)
      Array([-0.159,  0.   ,  0.841], dtype=float32)
      >>> jaxkern.gelu(x, approximate="none")
      Array([-0.159,  0.   ,  0.841], dtype=float32)
    """
    if approximate not in ("tanh", "none"):
        raise ValueError(
            f"gelu: `approximate` must be 'tanh' or 'none', got {approximate!r}."
        )
    return gelu_p(x, approximate=approximate)


def gelu_reference(x: Float[Array, "..."], *, approximate: str) -> Float[Array, "..."]:
    z = at_least_f32(x)
    return (z * gelu_factor(z, approximate)[0]).astype(x.dtype)


def gelu_bwd_reference(
    x: Float[Array, "..."], dy: Float[Array, "..."], *, approximate: str
) -> Float[Array, "..."]:
    z = at_least_f32(x)
    factor, slope = gelu_factor(z, approximate)
    return (at_least_f32(dy) * (factor + z * slope)).astype(x.dtype)


def gelu_factor(
    z: Float[Array, "..."], approximate: str
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """gelu(z) / z, and its derivative in z."""
    # Beyond 40 the factor is 0 or 1 and its slope 0 to the last bit, also in float64.
    # The clip keeps z**2 finite, whose product with a slope of 0 would be NaN.
    z = jnp.clip(z, -40, 40)
    if approximate == "none":
        return normal_cdf(z), normal_density(z)
    c, a = 2 * math.sqrt(2 / math.pi), 0.044715  # (1 + tanh(u)) / 2 = sigmoid(2 u)
    u2 = c * (z + a * z * z * z)
    factor = jax.nn.sigmoid(u2)
    return factor, factor * jax.nn.sigmoid(-u2) * c * (1 + 3 * a * z * z)


@jax.custom_jvp  # jax 0.12 cannot differentiate lax.erfc inside shard_map
def normal_cdf(z: Float[Array, "..."]) -> Float[Array, "..."]:
    return lax.erfc(-z / math.sqrt(2)) / 2


@normal_cdf.defjvp
def normal_cdf_jvp(primals: tuple, tangents: tuple) -> tuple:
    (z,), (dz,) = primals, tangents
    return normal_cdf(z), normal_density(z) * dz


def normal_density(z: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.exp(-z * z / 2) / math.sqrt(2 * math.pi)


gelu_p = kernel_primitive(gelu_reference, bwd=gelu_bwd_reference)
