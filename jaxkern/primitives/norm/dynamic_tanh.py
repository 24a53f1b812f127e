"""Dynamic tanh, a layer in the place of a norm: y = tanh(alpha x) * weight + bias
(https://arxiv.org/abs/2503.10622)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def dynamic_tanh(
    x: Float[Array, "... d"],
    alpha: Float[Array, ""] | float,
    weight: Float[Array, " d"] | None = None,
    bias: Float[Array, " d"] | None = None,
) -> Float[Array, "... d"]:
    """Dynamic tanh (DyT), a norm without statistics (https://arxiv.org/abs/2503.10622).

        y = tanh(alpha * x) * weight + bias

    Element by element, so a row may be cut anywhere. Computed in float32 (float64 for a
    float64 `x`) and rounded once, to x.dtype. Only the operands are kept for the
    backward pass. NaN propagates.

        y = dynamic_tanh(x, params["alpha"], params["weight"], params["bias"])

    Args:
      x: `[..., d]`, any float dtype.
      alpha: scalar, learned; 0.5 at the start in the paper.
      weight: `[d]`, or None for no scale.
      bias: `[d]`, or None for no shift.

    Returns:
      y: `[..., d]`, dtype of x.

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.

    Example:
      >>> jaxkern.dynamic_tanh(jnp.array([-1.0, 0.0, 9.0]), 0.5)
      Array([-0.462,  0.   ,  1.   ], dtype=float32)
    """
    alpha = jnp.asarray(alpha)
    if not jnp.issubdtype(alpha.dtype, jnp.floating):
        alpha = alpha.astype(jnp.promote_types(x.dtype, jnp.float32))
    return dynamic_tanh_p(x, alpha, weight, bias)


def dynamic_tanh_reference(
    x: Float[Array, "... d"],
    alpha: Float[Array, ""],
    weight: Float[Array, " d"] | None,
    bias: Float[Array, " d"] | None,
) -> Float[Array, "... d"]:
    y = jnp.tanh(at_least_f32(alpha) * at_least_f32(x))
    if weight is not None:
        y = y * at_least_f32(weight)
    if bias is not None:
        y = y + at_least_f32(bias)
    return y.astype(x.dtype)


def dynamic_tanh_bwd_reference(
    x: Float[Array, "... d"],
    alpha: Float[Array, ""],
    weight: Float[Array, " d"] | None,
    bias: Float[Array, " d"] | None,
    dy: Float[Array, "... d"],
) -> tuple[
    Float[Array, "... d"],
    Float[Array, ""],
    Float[Array, " d"] | None,
    Float[Array, " d"] | None,
]:
    x32, dy32, alpha32 = at_least_f32(x), at_least_f32(dy), at_least_f32(alpha)
    z = alpha32 * x32
    dz = dy32 if weight is None else dy32 * at_least_f32(weight)
    # 1 - tanh(z)**2 = 4 sigmoid(2 z) sigmoid(-2 z), without the cancellation
    dz = dz * 4 * jax.nn.sigmoid(2 * z) * jax.nn.sigmoid(-2 * z)
    rows = tuple(range(x.ndim - 1))
    dweight = None
    if weight is not None:
        dweight = (dy32 * jnp.tanh(z)).sum(rows).astype(weight.dtype)
    return (
        (dz * alpha32).astype(x.dtype),
        (dz * x32).sum().astype(alpha.dtype),
        dweight,
        None if bias is None else dy32.sum(rows).astype(bias.dtype),
    )


dynamic_tanh_p = kernel_primitive(
    dynamic_tanh_reference, bwd=dynamic_tanh_bwd_reference
)
