"""Soft cap: y = cap * tanh(x / cap)  (Gemma 2, https://arxiv.org/abs/2408.00118)."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def softcap(x: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """Soft cap on logits, as in Gemma 2 (https://arxiv.org/abs/2408.00118).

        y = cap * tanh(x / cap)

    Computed in float32 and rounded once. Infinite x give +-cap with gradient 0; NaN
    propagates.

    Args:
      x: `[...]`, any float dtype.
      cap: the bound, in units of x (Gemma 2: 50 for attention, 30 for the output
        logits), or None for no cap.

    Returns:
      y: shape and dtype of x.

    Raises:
      ValueError: `cap` is not a positive finite number.

    Example:
      >>> jaxkern.softcap(jnp.array([1.0, 30.0, 1000.0]), 30.0)
      Array([ 1.   , 22.848, 30.   ], dtype=float32)
    """
    if cap is None:
        return x
    if not 0 < cap < math.inf:
        raise ValueError(
            f"softcap: `cap` must be positive and finite, got {cap}. None means no cap."
        )
    return softcap_p(x, cap=float(cap))


def softcap_reference(x: Float[Array, "..."], *, cap: float) -> Float[Array, "..."]:
    return (cap * jnp.tanh(at_least_f32(x) / cap)).astype(x.dtype)


def softcap_bwd_reference(
    x: Float[Array, "..."], dy: Float[Array, "..."], *, cap: float
) -> Float[Array, "..."]:
    # 1 - tanh(z)**2 = 4 sigmoid(2 z) sigmoid(-2 z), without the cancellation
    z2 = 2 / cap * at_least_f32(x)
    slope = 4 * jax.nn.sigmoid(z2) * jax.nn.sigmoid(-z2)
    return (at_least_f32(dy) * slope).astype(x.dtype)


softcap_p = kernel_primitive(softcap_reference, bwd=softcap_bwd_reference)
