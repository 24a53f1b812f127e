"""y = residual + rms_norm(x) * weight, the sandwich norm  (https://arxiv.org/abs/1910.07467)."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


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
    """
    if scale is not None and jnp.ndim(scale) == 0:
        scale = jnp.reshape(scale, 1)
    return rms_norm_add_p(x, residual, weight, scale, eps=eps, offset=offset)


def rms_norm_add_reference(
    x: Float[Array, "... d"],
    residual: Float[Array, "... d"],
    weight: Float[Array, " d"] | None,
    scale: Float[Array, " #d"] | None,
    *,
    eps: float,
    offset: float,
) -> Float[Array, "... d"]:
    y, _ = rms_norm_add_fwd_reference(
        x, residual, weight, scale, eps=eps, offset=offset
    )
    return y


def rms_norm_add_fwd_reference(
    x: Float[Array, "... d"],
    residual: Float[Array, "... d"],
    weight: Float[Array, " d"] | None,
    scale: Float[Array, " #d"] | None,
    *,
    eps: float,
    offset: float,
) -> tuple[Float[Array, "... d"], Float[Array, "... 1"]]:
    x32 = at_least_f32(x)
    rstd = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    normed = x32 * rstd
    if weight is not None:
        normed = normed * (at_least_f32(weight) + offset)
    y = at_least_f32(residual) + normed
    if scale is not None:
        y = y * at_least_f32(scale)
    return y.astype(residual.dtype), rstd


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
    del eps  # already in rstd
    rows = tuple(range(x.ndim - 1))
    xhat, dsum, dscale = at_least_f32(x) * rstd, at_least_f32(dy), None
    factor = None if weight is None else at_least_f32(weight) + offset
    if scale is not None:
        normed = xhat if factor is None else xhat * factor
        dscale = (dsum * (at_least_f32(residual) + normed)).sum(rows)
        if scale.shape != dscale.shape:
            dscale = dscale.sum(keepdims=True)
        dscale = dscale.astype(scale.dtype)
        dsum = dsum * at_least_f32(scale)
    dxhat = dsum if factor is None else dsum * factor
    dx = rstd * (dxhat - xhat * jnp.mean(dxhat * xhat, axis=-1, keepdims=True))
    dweight = None if weight is None else (dsum * xhat).sum(rows).astype(weight.dtype)
    return dx.astype(x.dtype), dsum.astype(residual.dtype), dweight, dscale


rms_norm_add_p = kernel_primitive(
    rms_norm_add_reference,
    fwd=rms_norm_add_fwd_reference,
    bwd=rms_norm_add_bwd_reference,
    replicated=("d",),  # the mean runs over d: each device needs all of it
)
