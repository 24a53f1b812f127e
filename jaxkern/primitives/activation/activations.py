"""The activation functions by name, each with its derivative."""

import functools
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern.primitives.activation.gelu import gelu_factor

Activation = Literal[
    "none",
    "relu",
    "relu2",
    "clipped_relu",
    "elu",
    "gelu",
    "gelu_tanh",
    "silu",
    "sigmoid",
    "tanh",
]

# What `coefficient` means where an activation has one, and its default.
COEFFICIENTS = {"clipped_relu": 6.0, "elu": 1.0}  # the ceiling; alpha

Values = Float[Array, "..."]


def activation_coefficient(
    op: str, activation: Activation, coefficient: float | None
) -> float | None:
    """The coefficient to use, or a ValueError that names the op."""
    if activation not in get_args(Activation):
        raise ValueError(
            f"{op}: `activation` must be one of {', '.join(get_args(Activation))}, got "
            f"{activation!r}."
        )
    default = COEFFICIENTS.get(activation)
    if coefficient is None:
        return default
    if default is None:
        raise ValueError(
            f"{op}: {activation} has no `coefficient`, got {coefficient}. It belongs "
            f"to {' and '.join(COEFFICIENTS)}."
        )
    if not coefficient > 0:
        raise ValueError(
            f"{op}: `coefficient` of {activation} must be positive, got {coefficient}."
        )
    return float(coefficient)


def none(z: Values) -> tuple[Values, Values]:
    return z, jnp.ones_like(z)


def relu2(z: Values) -> tuple[Values, Values]:
    above, _ = relu(z)
    return above * above, 2 * above


def relu(z: Values) -> tuple[Values, Values]:
    return jnp.where(z <= 0, 0, z), jnp.where(z > 0, 1.0, 0.0)


def clipped_relu(z: Values, ceiling: float) -> tuple[Values, Values]:
    y = jnp.where(z <= 0, 0, jnp.where(z >= ceiling, ceiling, z))
    return y, jnp.where((z > 0) & (z < ceiling), 1.0, 0.0)


def elu(z: Values, alpha: float) -> tuple[Values, Values]:
    below = jnp.where(z > 0, 0, z)  # exp of a large z would overflow, and its slope
    y = jnp.where(z > 0, z, alpha * jnp.expm1(below))
    return y, jnp.where(z > 0, 1, alpha * jnp.exp(below))


def gelu(z: Values, approximate: str) -> tuple[Values, Values]:
    factor, slope = gelu_factor(z, approximate)
    return z * factor, factor + z * slope


def silu(z: Values) -> tuple[Values, Values]:
    s = jax.nn.sigmoid(z)
    return z * s, s * (1 + z * (1 - s))


def sigmoid(z: Values) -> tuple[Values, Values]:
    s = jax.nn.sigmoid(z)
    return s, s * jax.nn.sigmoid(-z)  # 1 - s would lose its small values


def tanh(z: Values) -> tuple[Values, Values]:
    # 1 - tanh(z)**2 = 4 sigmoid(2 z) sigmoid(-2 z), without the cancellation
    return jnp.tanh(z), 4 * jax.nn.sigmoid(2 * z) * jax.nn.sigmoid(-2 * z)


# The derivative of relu and of clipped_relu is 0 at their corners, as in cuDNN and
# PyTorch; that of elu at 0 is alpha.
ACTIVATIONS: dict[str, Callable[..., tuple[Values, Values]]] = {
    "none": none,
    "relu": relu,
    "relu2": relu2,
    "clipped_relu": clipped_relu,
    "elu": elu,
    "gelu": functools.partial(gelu, approximate="none"),
    "gelu_tanh": functools.partial(gelu, approximate="tanh"),
    "silu": silu,
    "sigmoid": sigmoid,
    "tanh": tanh,
}


def activate(
    z: Values, activation: str, coefficient: float | None
) -> tuple[Values, Values]:
    """The activation of z and its derivative there."""
    f = ACTIVATIONS[activation]
    return f(z) if coefficient is None else f(z, coefficient)
