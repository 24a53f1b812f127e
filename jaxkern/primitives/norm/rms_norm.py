"""RMS normalisation: y = x / rms(x) * weight  (https://arxiv.org/abs/1910.07467)."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import without_residuals
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def rms_norm(
    x: Float[Array, "... d"],
    weight: Float[Array, " d"] | None = None,
    bias: Float[Array, " d"] | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> Float[Array, "... d"]:
    """Root-mean-square normalisation over the last dim (https://arxiv.org/abs/1910.07467).

        y = x / sqrt(mean(x**2) + eps) * (weight + offset) + bias

    Statistics in float32 (float64 for a float64 `x`); one rounding, to x.dtype.

    Args:
      x: `[..., d]`, any float dtype.
      weight: `[d]`, or None for no scale.
      bias: `[d]`, or None for no shift.
      eps: added to the mean square, in units of x**2.
      offset: added to `weight`; 1.0 for Gemma, whose checkpoints store weight - 1.

    Returns:
      y: `[..., d]`, dtype of x.

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: eps is negative or not finite.

    Example:
      >>> x = jnp.array([[3.0, 4.0], [0.0, 2.0]])
      >>> jaxkern.rms_norm(x, jnp.array([1.0, 10.0]))
      Array([[ 0.849, 11.314],
             [ 0.   , 14.142]], dtype=float32)
    """
    return rms_norm_p(x, weight, bias, eps=eps, offset=offset)


def rms_norm_fwd_reference(
    x: Float[Array, "... d"],
    weight: Float[Array, " d"] | None,
    bias: Float[Array, " d"] | None,
    *,
    eps: float,
    offset: float,
) -> tuple[Float[Array, "... d"], Float[Array, "... 1"]]:
    x32 = at_least_f32(x)
    rstd = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    y = x32 * rstd
    if weight is not None:
        y = y * (at_least_f32(weight) + offset)
    if bias is not None:
        y = y + at_least_f32(bias)
    return y.astype(x.dtype), rstd


rms_norm_reference = without_residuals(rms_norm_fwd_reference)


def rms_norm_bwd_reference(
    x: Float[Array, "... d"],
    weight: Float[Array, " d"] | None,
    bias: Float[Array, " d"] | None,
    rstd: Float[Array, "... 1"],
    dy: Float[Array, "... d"],
    *,
    eps: float,
    offset: float,
) -> tuple[Float[Array, "... d"], Float[Array, " d"] | None, Float[Array, " d"] | None]:
    del eps  # already in rstd
    xhat, dy32 = at_least_f32(x) * rstd, at_least_f32(dy)
    dxhat = dy32 if weight is None else dy32 * (at_least_f32(weight) + offset)
    dx = rstd * (dxhat - xhat * jnp.mean(dxhat * xhat, axis=-1, keepdims=True))
    rows = tuple(range(x.ndim - 1))
    dweight = None if weight is None else (dy32 * xhat).sum(rows).astype(weight.dtype)
    dbias = None if bias is None else dy32.sum(rows).astype(bias.dtype)
    return dx.astype(x.dtype), dweight, dbias


rms_norm_p = kernel_primitive(
    rms_norm_reference,
    fwd=rms_norm_fwd_reference,
    bwd=rms_norm_bwd_reference,
    replicated=("d",),  # the mean runs over d: each device needs all of it
)
