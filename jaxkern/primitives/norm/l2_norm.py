"""L2 normalisation: y = x / sqrt(sum(x**2) + eps)  (https://arxiv.org/abs/2412.06464)."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import axis_within, without_residuals
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def l2_norm(
    x: Float[Array, "..."], *, eps: float = 1e-6, axis: int = -1
) -> Float[Array, "..."]:
    """Scales each vector to length 1, as the queries and keys of the gated delta rule.

        y = x / sqrt(sum(x**2) + eps)

    The sum, not the mean as in `rms_norm`, and eps inside the root, as in
    flash-linear-attention. `torch.nn.functional.normalize` divides by max(norm, eps)
    instead. Computed in float32 (float64 for a float64 `x`) and rounded once. A zero
    vector stays zero; its gradient is finite for eps > 0.

    Source: https://arxiv.org/abs/2412.06464.

    Args:
      x: `[...]`, any float dtype, at least one dim.
      eps: added to the sum of squares, in units of x**2.
      axis: the dim to sum over.

    Returns:
      y: shape and dtype of x.

    Raises:
      TypeError: `x` is not an array of floats.
      ValueError: eps is negative or not finite.

    Example:
      >>> jaxkern.l2_norm(jnp.array([[3.0, 4.0], [0.0, 0.0]]))
      Array([[0.6, 0.8],
             [0. , 0. ]], dtype=float32)
    """
    axis = axis_within("l2_norm", axis, x.ndim)
    y = l2_norm_p(jnp.moveaxis(x, axis, -1), eps=eps)
    return jnp.moveaxis(y, -1, axis)


def l2_norm_fwd_reference(
    x: Float[Array, "... d"], *, eps: float
) -> tuple[Float[Array, "... d"], Float[Array, "... 1"]]:
    x32 = at_least_f32(x)
    rnorm = lax.rsqrt(jnp.sum(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * rnorm).astype(x.dtype), rnorm


l2_norm_reference = without_residuals(l2_norm_fwd_reference)


def l2_norm_bwd_reference(
    x: Float[Array, "... d"],
    rnorm: Float[Array, "... 1"],
    dy: Float[Array, "... d"],
    *,
    eps: float,
) -> Float[Array, "... d"]:
    del eps  # already in rnorm
    y, dy32 = at_least_f32(x) * rnorm, at_least_f32(dy)
    dx = rnorm * (dy32 - y * jnp.sum(dy32 * y, axis=-1, keepdims=True))
    return dx.astype(x.dtype)


l2_norm_p = kernel_primitive(
    l2_norm_reference,
    fwd=l2_norm_fwd_reference,
    bwd=l2_norm_bwd_reference,
    replicated=("d",),  # the sum runs over d: each device needs all of it
)
