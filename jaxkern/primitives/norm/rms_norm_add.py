"""y = residual + rms_norm(x) * weight, the sandwich norm  (https://arxiv.org/abs/1910.07467)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import without_residuals
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.norm.rms_norm import (
    rms_norm_bwd_reference,
    rms_norm_fwd_reference,
)


@check_arguments
def rms_norm_add(
    x: Float[Array, "... d"],
    residual: Float[Array, "... d"],
    weight: Float[Array, " d"] | None = None,
    scale: Float[Array, " #d"] | float | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> Float[Array, "... d"]:
    """Normalises a block's output and adds it to the residual stream.

        y = (residual + x / sqrt(mean(x**2) + eps) * (weight + offset)) * scale

    The norm is that of x alone (`add_rms_norm` takes it of the sum). Computed in
    float32 (float64 for float64 operands) and rounded once: `residual + rms_norm(x)`
    in bfloat16 rounds the norm first, so it differs by that rounding.

    Source: https://arxiv.org/abs/1910.07467.

    Args:
      x: `[..., d]`, any float dtype: what the block gives.
      residual: `[..., d]`, any float dtype.
      weight: `[d]`, or None for no scale of the norm.
      scale: `[d]`, `[1]` or a scalar, factor of the sum (Gemma 4's layer scalar); None
        for 1.
      eps: added to the mean square, in units of x**2.
      offset: added to `weight`; 1.0 for Gemma 2 and 3, which store weight - 1.

    Returns:
      y: `[..., d]`, dtype of residual.

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: eps is negative or not finite.

    Example:
      >>> x, residual = jnp.array([[3.0, 4.0]]), jnp.array([[1.0, 1.0]])
      >>> jaxkern.rms_norm_add(x, residual)  # the norm of x alone
      Array([[1.849, 2.131]], dtype=float32)
    """
    if scale is not None and jnp.ndim(scale) == 0:
        scale = jnp.reshape(scale, 1)
    return rms_norm_add_p(x, residual, weight, scale, eps=eps, offset=offset)


def rms_norm_add_fwd_reference(
    x: Float[Array, "... d"],
    residual: Float[Array, "... d"],
    weight: Float[Array, " d"] | None,
    scale: Float[Array, " #d"] | None,
    *,
    eps: float,
    offset: float,
) -> tuple[Float[Array, "... d"], Float[Array, "... 1"]]:
    normed, rstd = rms_norm_fwd_reference(
        at_least_f32(x), weight, None, eps=eps, offset=offset
    )
    y = at_least_f32(residual) + normed
    if scale is not None:
        y = y * at_least_f32(scale)
    return y.astype(residual.dtype), rstd


rms_norm_add_reference = without_residuals(rms_norm_add_fwd_reference)


def rms_norm_add_bwd_reference(
    x: Float[Array, "... d"],
    residual: Float[Array, "... d"],
    weight: Float[Array, " d"] | None,
    scale: Float[Array, " #d"] | None,
    rstd: Float[Array, "... 1"],
    dy: Float[Array, "... d"],
    *,
    eps: float,
    offset: float,
) -> tuple[
    Float[Array, "... d"],
    Float[Array, "... d"],
    Float[Array, " d"] | None,
    Float[Array, " #d"] | None,
]:
    dsum, dscale = at_least_f32(dy), None
    if scale is not None:
        normed = at_least_f32(x) * rstd
        if weight is not None:
            normed = normed * (at_least_f32(weight) + offset)
        rows = tuple(range(x.ndim - 1))
        dscale = (dsum * (at_least_f32(residual) + normed)).sum(rows)
        if scale.shape != dscale.shape:
            dscale = dscale.sum(keepdims=True)
        dscale = dscale.astype(scale.dtype)
        dsum = dsum * at_least_f32(scale)
    dx, dweight, _ = rms_norm_bwd_reference(
        x, weight, None, rstd, dsum, eps=eps, offset=offset
    )
    return dx, dsum.astype(residual.dtype), dweight, dscale


rms_norm_add_p = kernel_primitive(
    rms_norm_add_reference,
    fwd=rms_norm_add_fwd_reference,
    bwd=rms_norm_add_bwd_reference,
    replicated=("d",),  # the mean runs over d: each device needs all of it
)
