"""Layer normalisation: y = (x - mean) / std * weight + bias  (https://arxiv.org/abs/1607.06450)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import without_residuals
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def layer_norm(
    x: Float[Array, "... d"],
    weight: Float[Array, " d"] | None = None,
    bias: Float[Array, " d"] | None = None,
    *,
    eps: float = 1e-5,
    offset: float = 0.0,
) -> Float[Array, "... d"]:
    """Layer normalisation over the last dim (https://arxiv.org/abs/1607.06450).

        y = (x - mean(x)) / sqrt(var(x) + eps) * (weight + offset) + bias

    with the biased variance mean((x - mean)**2), in which the mean is subtracted first:
    mean(x**2) - mean(x)**2 loses all digits of a row far from zero. Statistics in
    float32 (float64 for a float64 `x`); one rounding, to x.dtype.

    Args:
      x: `[..., d]`, any float dtype.
      weight: `[d]`, or None for no scale.
      bias: `[d]`, or None for no shift.
      eps: added to the variance, in units of x**2.
      offset: added to `weight`; 1.0 for checkpoints that store weight - 1 (Nemotron's
        layernorm1p).

    Returns:
      y: `[..., d]`, dtype of x.

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: eps is negative or not finite.

    Example:
      >>> jaxkern.layer_norm(jnp.array([[1.0, 2.0, 3.0]]))
      Array([[-1.225,  0.   ,  1.225]], dtype=float32)
    """
    return layer_norm_p(x, weight, bias, eps=eps, offset=offset)


def mean_and_variance(x: jax.Array, axis: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Mean and biased variance over `axis`, whose dims stay with size 1."""
    mean = jnp.mean(x, axis=axis, keepdims=True)
    # a sum over a long row far from zero has lost digits: the second mean restores them
    mean = mean + jnp.mean(x - mean, axis=axis, keepdims=True)
    return mean, jnp.mean((x - mean) ** 2, axis=axis, keepdims=True)


def layer_norm_fwd_reference(
    x: Float[Array, "... d"],
    weight: Float[Array, " d"] | None,
    bias: Float[Array, " d"] | None,
    *,
    eps: float,
    offset: float,
) -> tuple[Float[Array, "... d"], Float[Array, "... 1"], Float[Array, "... 1"]]:
    x32 = at_least_f32(x)
    mean, variance = mean_and_variance(x32, axis=(-1,))
    rstd = lax.rsqrt(variance + eps)
    y = (x32 - mean) * rstd
    if weight is not None:
        y = y * (at_least_f32(weight) + offset)
    if bias is not None:
        y = y + at_least_f32(bias)
    return y.astype(x.dtype), mean, rstd


layer_norm_reference = without_residuals(layer_norm_fwd_reference)


def layer_norm_bwd_reference(
    x: Float[Array, "... d"],
    weight: Float[Array, " d"] | None,
    bias: Float[Array, " d"] | None,
    mean: Float[Array, "... 1"],
    rstd: Float[Array, "... 1"],
    dy: Float[Array, "... d"],
    *,
    eps: float,
    offset: float,
) -> tuple[Float[Array, "... d"], Float[Array, " d"] | None, Float[Array, " d"] | None]:
    del eps  # already in rstd
    xhat, dy32 = (at_least_f32(x) - mean) * rstd, at_least_f32(dy)
    dxhat = dy32 if weight is None else dy32 * (at_least_f32(weight) + offset)
    along_mean = jnp.mean(dxhat, axis=-1, keepdims=True)
    along_xhat = xhat * jnp.mean(dxhat * xhat, axis=-1, keepdims=True)
    dx = rstd * (dxhat - along_mean - along_xhat)
    rows = tuple(range(x.ndim - 1))
    dweight = None if weight is None else (dy32 * xhat).sum(rows).astype(weight.dtype)
    dbias = None if bias is None else dy32.sum(rows).astype(bias.dtype)
    return dx.astype(x.dtype), dweight, dbias


layer_norm_p = kernel_primitive(
    layer_norm_reference,
    fwd=layer_norm_fwd_reference,
    bwd=layer_norm_bwd_reference,
    replicated=("d",),  # the means run over d: each device needs all of it
)
