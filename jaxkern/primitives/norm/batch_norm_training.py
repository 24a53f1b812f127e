"""Batch normalisation with the batch's statistics  (https://arxiv.org/abs/1502.03167)."""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import without_residuals
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.norm.layer_norm import mean_and_variance


@check_arguments
def batch_norm_training(
    x: Float[Array, "..."],
    running_mean: Float[Array, " channel"],
    running_variance: Float[Array, " channel"],
    weight: Float[Array, " channel"] | None = None,
    bias: Float[Array, " channel"] | None = None,
    *,
    momentum: float = 0.1,
    eps: float = 1e-5,
    axis: int = 1,
) -> tuple[Float[Array, "..."], Float[Array, " channel"], Float[Array, " channel"]]:
    """Normalises each channel over the batch and updates the running statistics.

        y = (x - mean) / sqrt(var + eps) * weight + bias     mean, var of each channel
        running_mean     <- (1 - m) * running_mean     + m * mean
        running_variance <- (1 - m) * running_variance + m * var * n / (n - 1)

    with m = momentum, over the n = b * height * width values of a channel. `var` is
    biased in y and unbiased in the running update, as in PyTorch and cuDNN; Flax's
    momentum is 1 - ours and its update is biased. A sharded batch is
    normalised as a whole under `jit`.

    Statistics in float32 (float64 for a float64 `x`), the mean subtracted before
    squaring. With n = 1 the variance is 0 in both places; with n = 0 the running
    statistics stay as they are. The new ones carry gradients: `jax.lax.stop_gradient`
    them where they leave the loss.

    Source: https://arxiv.org/abs/1502.03167.

    Args:
      x: `[b, channel, height, width]` with axis=1 (NCHW), or
        `[b, height, width, channel]` with axis=-1 (NHWC); any number of pixel dims.
      running_mean: `[channel]`.
      running_variance: `[channel]`.
      weight: `[channel]`, or None for no scale.
      bias: `[channel]`, or None for no shift.
      momentum: share of this batch in the running statistics.
      eps: added to the variance, in units of x**2.
      axis: the dim of the channels.

    Returns:
      y: shape and dtype of x.
      running_mean: `[channel]`, updated, dtype as given.
      running_variance: `[channel]`, updated, dtype as given.

    Raises:
      TypeError: a dtype is not a float, or a size is not the number of channels.
      ValueError: eps is negative or not finite.

    Example:
      >>> x = jnp.array([1.0, 3.0, 30.0, 50.0]).reshape(1, 2, 1, 2)
      >>> zeros, ones = jnp.zeros(2), jnp.ones(2)
      >>> y, mean, variance = jaxkern.batch_norm_training(x, zeros, ones, momentum=0.5)
      >>> y.reshape(2, 2)
      Array([[-1.,  1.],
             [-1.,  1.]], dtype=float32)
      >>> mean, variance
      (Array([ 1., 20.], dtype=float32), Array([  1.5, 100.5], dtype=float32))
    """
    images = jnp.moveaxis(x, axis, 1)
    for name, v in (("mean", running_mean), ("variance", running_variance)):
        if jnp.shape(v) != images.shape[1:2]:
            raise TypeError(
                f"batch_norm_training: `running_{name}` must have shape "
                f"{images.shape[1:2]}, got {jnp.shape(v)}."
            )
    rows = images.reshape(*images.shape[:2], math.prod(images.shape[2:]))
    y, mean, variance = batch_norm_training_p(rows, weight, bias, eps=eps)
    n = rows.shape[0] * rows.shape[2]

    def updated(running, batch):
        new = (1 - momentum) * at_least_f32(running) + momentum * batch
        return new.astype(running.dtype) if n else running

    return (
        jnp.moveaxis(y.reshape(images.shape), 1, axis),
        updated(running_mean, mean),
        updated(running_variance, variance * (n / max(n - 1, 1))),
    )


def batch_norm_training_fwd_reference(
    x: Float[Array, "batch channel pixel"],
    weight: Float[Array, " channel"] | None,
    bias: Float[Array, " channel"] | None,
    *,
    eps: float,
) -> tuple[
    Float[Array, "batch channel pixel"],
    Float[Array, " channel"],
    Float[Array, " channel"],
    Float[Array, "1 channel 1"],
    Float[Array, "1 channel 1"],
]:
    x32 = at_least_f32(x)
    mean, variance = mean_and_variance(x32, axis=(0, 2))
    rstd = lax.rsqrt(variance + eps)
    y = (x32 - mean) * rstd
    if weight is not None:
        y = y * at_least_f32(weight)[:, None]
    if bias is not None:
        y = y + at_least_f32(bias)[:, None]
    return y.astype(x.dtype), mean[0, :, 0], variance[0, :, 0], mean, rstd


batch_norm_training_reference = without_residuals(batch_norm_training_fwd_reference, 3)


def batch_norm_training_bwd_reference(
    x: Float[Array, "batch channel pixel"],
    weight: Float[Array, " channel"] | None,
    bias: Float[Array, " channel"] | None,
    mean: Float[Array, "1 channel 1"],
    rstd: Float[Array, "1 channel 1"],
    dy: Float[Array, "batch channel pixel"],
    dmean: Float[Array, " channel"],
    dvariance: Float[Array, " channel"],
    *,
    eps: float,
) -> tuple[
    Float[Array, "batch channel pixel"],
    Float[Array, " channel"] | None,
    Float[Array, " channel"] | None,
]:
    del eps  # already in rstd
    centred, dy32 = at_least_f32(x) - mean, at_least_f32(dy)
    xhat = centred * rstd
    dxhat = dy32 if weight is None else dy32 * at_least_f32(weight)[:, None]
    along_mean = jnp.mean(dxhat, axis=(0, 2), keepdims=True)
    along_xhat = xhat * jnp.mean(dxhat * xhat, axis=(0, 2), keepdims=True)
    dx = rstd * (dxhat - along_mean - along_xhat)
    n = max(x.shape[0] * x.shape[2], 1)
    dx = dx + (dmean[:, None] + 2 * dvariance[:, None] * centred) / n
    dweight = None if weight is None else (dy32 * xhat).sum((0, 2)).astype(weight.dtype)
    dbias = None if bias is None else dy32.sum((0, 2)).astype(bias.dtype)
    return dx.astype(x.dtype), dweight, dbias


batch_norm_training_p = kernel_primitive(
    batch_norm_training_reference,
    fwd=batch_norm_training_fwd_reference,
    bwd=batch_norm_training_bwd_reference,
    replicated=("batch", "pixel"),  # the means run over them
)
