"""Batch normalisation with given statistics  (https://arxiv.org/abs/1502.03167)."""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive


@check_arguments
def batch_norm(
    x: Float[Array, "..."],
    mean: Float[Array, " channel"],
    variance: Float[Array, " channel"],
    weight: Float[Array, " channel"] | None = None,
    bias: Float[Array, " channel"] | None = None,
    *,
    eps: float = 1e-5,
    axis: int = 1,
) -> Float[Array, "..."]:
    """Normalises each channel by given statistics, as a trained model does.

        y = (x - mean) / sqrt(variance + eps) * weight + bias     for each channel

    `batch_norm_training` takes the statistics from the batch. Computed in float32
    (float64 for float64 operands) and rounded once, to x.dtype. Gradients go to all
    operands, the statistics among them.

    Source: https://arxiv.org/abs/1502.03167.

    Args:
      x: `[b, channel, height, width]` with axis=1 (NCHW), or
        `[b, height, width, channel]` with axis=-1 (NHWC); any number of pixel dims.
      mean: `[channel]`.
      variance: `[channel]`, not negative.
      weight: `[channel]`, or None for no scale.
      bias: `[channel]`, or None for no shift.
      eps: added to the variance, in units of x**2.
      axis: the dim of the channels.

    Returns:
      y: shape and dtype of x.

    Raises:
      TypeError: a dtype is not a float, or a size is not the number of channels.
      ValueError: eps is negative or not finite.

    Example:
      >>> x = jnp.array([1.0, 2.0, 30.0, 40.0]).reshape(1, 2, 1, 2)
      >>> mean, variance = jnp.array([1.0, 30.0]), jnp.array([1.0, 100.0])
      >>> jaxkern.batch_norm(x, mean, variance).reshape(2, 2)
      Array([[0., 1.],
             [0., 1.]], dtype=float32)
    """
    images = jnp.moveaxis(x, axis, 1)
    rows = images.reshape(*images.shape[:2], math.prod(images.shape[2:]))
    y = batch_norm_p(rows, mean, variance, weight, bias, eps=eps)
    return jnp.moveaxis(y.reshape(images.shape), 1, axis)


def batch_norm_reference(
    x: Float[Array, "... channel pixel"],
    mean: Float[Array, " channel"],
    variance: Float[Array, " channel"],
    weight: Float[Array, " channel"] | None,
    bias: Float[Array, " channel"] | None,
    *,
    eps: float,
) -> Float[Array, "... channel pixel"]:
    rstd = lax.rsqrt(at_least_f32(variance) + eps)[:, None]
    y = (at_least_f32(x) - at_least_f32(mean)[:, None]) * rstd
    if weight is not None:
        y = y * at_least_f32(weight)[:, None]
    if bias is not None:
        y = y + at_least_f32(bias)[:, None]
    return y.astype(x.dtype)


def batch_norm_bwd_reference(
    x: Float[Array, "... channel pixel"],
    mean: Float[Array, " channel"],
    variance: Float[Array, " channel"],
    weight: Float[Array, " channel"] | None,
    bias: Float[Array, " channel"] | None,
    dy: Float[Array, "... channel pixel"],
    *,
    eps: float,
) -> tuple[
    Float[Array, "... channel pixel"],
    Float[Array, " channel"],
    Float[Array, " channel"],
    Float[Array, " channel"] | None,
    Float[Array, " channel"] | None,
]:
    rstd, dy32 = lax.rsqrt(at_least_f32(variance) + eps), at_least_f32(dy)
    xhat = (at_least_f32(x) - at_least_f32(mean)[:, None]) * rstd[:, None]
    rest = (*range(x.ndim - 2), x.ndim - 1)  # all but the channel
    along_xhat, total = (dy32 * xhat).sum(rest), dy32.sum(rest)
    slope = rstd if weight is None else rstd * at_least_f32(weight)  # dy/dx
    return (
        (dy32 * slope[:, None]).astype(x.dtype),
        (-slope * total).astype(mean.dtype),
        (-0.5 * slope * rstd * along_xhat).astype(variance.dtype),
        None if weight is None else along_xhat.astype(weight.dtype),
        None if bias is None else total.astype(bias.dtype),
    )


batch_norm_p = kernel_primitive(batch_norm_reference, bwd=batch_norm_bwd_reference)
