"""Gated linear unit: y = activation(gate) * up  (https://arxiv.org/abs/2002.05202)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern.primitives.activation.activations import (
    Activation,
    activate,
    activation_coefficient,
)
from jaxkern.primitives.activation.swiglu import split_packed
from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def glu(
    gate: Float[Array, "..."],
    up: Float[Array, "..."] | None = None,
    *,
    activation: Activation = "sigmoid",
) -> Float[Array, "..."]:
    """Gated linear unit with any activation (https://arxiv.org/abs/2002.05202).

        y = activation(gate) * up

    | name in the paper | activation |
    |---|---|
    | GLU | "sigmoid" |
    | Bilinear | "none" |
    | ReGLU | "relu" |
    | GEGLU, SwiGLU | "gelu", "silu"; `geglu` and `swiglu` have more options |

    "relu2" and "tanh" occur too; all names are those of `bias_activation`, with the
    coefficients that it has by default. Computed in float32 and rounded once. Only
    `gate` and `up` are kept for the backward pass. NaN propagates.

        glu(x @ w_gate, x @ w_up, activation="relu")

    Args:
      gate: `[...]`, or both halves packed along the last dim, `[..., 2 * f]` with the
        gate first.
      up: `[...]`, the shape of gate; None if `gate` is packed.
      activation: a name of the table in `bias_activation`.

    Returns:
      y: the shape of `up`; the dtype to which those of gate and up promote.

    Raises:
      TypeError: shapes differ, or the last dim of a packed `gate` is odd.
      ValueError: an unknown activation.

    Example:
      >>> gate, up = jnp.array([-1.0, 2.0]), jnp.array([3.0, 3.0])
      >>> jaxkern.glu(gate, up)
      Array([0.807, 2.642], dtype=float32)
      >>> jaxkern.glu(gate, up, activation="relu")  # ReGLU
      Array([0., 6.], dtype=float32)
    """
    activation_coefficient("glu", activation, None)
    if up is None:
        gate, up = split_packed(gate, "glu")
    return glu_p(gate, up, activation=activation)


def glu_reference(
    gate: Float[Array, "..."], up: Float[Array, "..."], *, activation: Activation
) -> Float[Array, "..."]:
    coefficient = activation_coefficient("glu", activation, None)
    y, _ = activate(at_least_f32(gate), activation, coefficient)
    return (y * at_least_f32(up)).astype(jnp.result_type(gate, up))


def glu_bwd_reference(
    gate: Float[Array, "..."],
    up: Float[Array, "..."],
    dy: Float[Array, "..."],
    *,
    activation: Activation,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    coefficient = activation_coefficient("glu", activation, None)
    y, slope = activate(at_least_f32(gate), activation, coefficient)
    dy32 = at_least_f32(dy)
    dgate = dy32 * at_least_f32(up) * slope
    return dgate.astype(gate.dtype), (dy32 * y).astype(up.dtype)


glu_p = kernel_primitive(glu_reference, bwd=glu_bwd_reference)
