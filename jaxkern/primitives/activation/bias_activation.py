"""Bias and activation in one step: y = activation(x + bias)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern.primitives.activation.activations import (
    Activation,
    activate,
    activation_coefficient,
)
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def bias_activation(
    x: Float[Array, "... d"],
    bias: Float[Array, " d"] | None,
    *,
    activation: Activation,
    coefficient: float | None = None,
) -> Float[Array, "... d"]:
    """Adds a bias to the last dim and applies an activation, with one rounding.

        y = activation(x + bias)

        none          z
        relu          max(z, 0)
        relu2         max(z, 0)**2, of Primer, https://arxiv.org/abs/2109.08668
        clipped_relu  min(max(z, 0), coefficient)
        elu           z where z > 0, coefficient * (exp(z) - 1) elsewhere
        gelu          z * Phi(z), Phi the normal distribution function
        gelu_tanh     z/2 * (1 + tanh(sqrt(2/pi) * (z + 0.044715 * z**3)))
        silu          z / (1 + exp(-z))
        sigmoid       1 / (1 + exp(-z))
        tanh          tanh(z)

    The sum is float32 and not rounded before the activation. Only x and bias are kept
    for the backward pass. The derivatives of relu and clipped_relu are 0 at their
    corners, that of elu at 0 is its coefficient. NaN propagates.

    Args:
      x: `[..., d]`, any float dtype.
      bias: `[d]`, or None for the activation alone.
      activation: a name of the table.
      coefficient: of clipped_relu (6 unless given) and of elu (1), positive.

    Returns:
      y: shape and dtype of x.

    Raises:
      ValueError: an unknown activation, or a coefficient that it does not have.

    Example:
      >>> x, bias = jnp.array([[-1.0, 2.0]]), jnp.array([0.5, 0.5])
      >>> jaxkern.bias_activation(x, bias, activation="relu")
      Array([[0. , 2.5]], dtype=float32)
    """
    coefficient = activation_coefficient("bias_activation", activation, coefficient)
    return bias_activation_p(x, bias, activation=activation, coefficient=coefficient)


def bias_activation_reference(
    x: Float[Array, "... d"],
    bias: Float[Array, " d"] | None,
    *,
    activation: str,
    coefficient: float | None,
) -> Float[Array, "... d"]:
    y, _ = activate(biased(x, bias), activation, coefficient)
    return y.astype(x.dtype)


def bias_activation_bwd_reference(
    x: Float[Array, "... d"],
    bias: Float[Array, " d"] | None,
    dy: Float[Array, "... d"],
    *,
    activation: str,
    coefficient: float | None,
) -> tuple[Float[Array, "... d"], Float[Array, " d"] | None]:
    _, slope = activate(biased(x, bias), activation, coefficient)
    dz = at_least_f32(dy) * slope
    if bias is None:
        return dz.astype(x.dtype), None
    dbias = jnp.sum(dz, axis=range(x.ndim - 1))
    return dz.astype(x.dtype), dbias.astype(bias.dtype)


def biased(
    x: Float[Array, "... d"], bias: Float[Array, " d"] | None
) -> Float[Array, "... d"]:
    x32 = at_least_f32(x)
    return x32 if bias is None else x32 + at_least_f32(bias)


bias_activation_p = kernel_primitive(
    bias_activation_reference, bwd=bias_activation_bwd_reference
)
