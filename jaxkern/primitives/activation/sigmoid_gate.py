"""Sigmoid gate: y = x * sigmoid(gate)  (https://arxiv.org/abs/1612.08083)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def sigmoid_gate(
    x: Float[Array, "..."], gate: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Lets through the share of x that a gate names: the gated linear unit.

        y = x * sigmoid(gate),    sigmoid(z) = 1 / (1 + exp(-z))

    The output gate of attention in Qwen3-Next and Qwen3.5; not SiLU, whose gate has a
    factor of its own (`swiglu`). Computed in float32 and rounded once. Only x and gate
    are kept for the backward pass. An infinite x with a closed gate is NaN; NaN
    propagates.

    Source: https://arxiv.org/abs/1612.08083.

    Args:
      x: `[...]`, any float dtype.
      gate: `[...]`, the shape of x.

    Returns:
      y: the shape of x; the dtype to which those of x and gate promote.

    Raises:
      TypeError: shapes differ.

    Example:
      >>> x, gate = jnp.array([2.0, 2.0, 2.0]), jnp.array([-9.0, 0.0, 9.0])
      >>> jaxkern.sigmoid_gate(x, gate)
      Array([0., 1., 2.], dtype=float32)
    """
    return sigmoid_gate_p(x, gate)


def sigmoid_gate_reference(
    x: Float[Array, "..."], gate: Float[Array, "..."]
) -> Float[Array, "..."]:
    y = at_least_f32(x) * jax.nn.sigmoid(at_least_f32(gate))
    return y.astype(jnp.result_type(x, gate))


def sigmoid_gate_bwd_reference(
    x: Float[Array, "..."], gate: Float[Array, "..."], dy: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    z, dy32 = at_least_f32(gate), at_least_f32(dy)
    s = jax.nn.sigmoid(z)
    # sigmoid(-z), for 1 - s would lose its small values
    dgate = dy32 * at_least_f32(x) * s * jax.nn.sigmoid(-z)
    return (dy32 * s).astype(x.dtype), dgate.astype(gate.dtype)


sigmoid_gate_p = kernel_primitive(
    sigmoid_gate_reference, bwd=sigmoid_gate_bwd_reference
)
