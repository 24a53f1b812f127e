"""Group normalisation: layer norm over groups of channels  (https://arxiv.org/abs/1803.08494)."""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.declared_dims import without_residuals
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.norm.layer_norm import mean_and_variance


@check_arguments
def group_norm(
    x: Float[Array, "..."],
    weight: Float[Array, " channels"] | None = None,
    bias: Float[Array, " channels"] | None = None,
    *,
    groups: int,
    eps: float = 1e-5,
    axis: int = 1,
) -> Float[Array, "..."]:
    """Normalises each group of channels of each image (https://arxiv.org/abs/1803.08494).

        y = (x - mean) / sqrt(var + eps) * weight + bias

    with mean and biased variance over the pixels and channels of a group; a group is a
    run of channels / groups neighbours. groups=1 is a layer norm of each image,
    groups=channels an instance norm. Statistics in float32 (float64 for a float64 `x`),
    the mean subtracted before squaring; one rounding, to x.dtype.

    Args:
      x: `[b, channels, height, width]` with axis=1 (NCHW), or
        `[b, height, width, channels]` with axis=-1 (NHWC); any number of pixel dims.
      weight: `[channels]`, or None for no scale.
      bias: `[channels]`, or None for no shift.
      groups: how many; a divisor of the channels.
      eps: added to the variance, in units of x**2.
      axis: the dim of the channels.

    Returns:
      y: shape and dtype of x.

    Raises:
      TypeError: a dtype is not a float, or `weight` or `bias` does not fit.
      ValueError: `groups` does not divide the channels, or
        an eps that is negative or not finite.

    Example:
      >>> image = jnp.array([0.0, 2.0, 10.0, 30.0]).reshape(1, 4, 1, 1)
      >>> jaxkern.group_norm(image, groups=2).reshape(4)
      Array([-1.,  1., -1.,  1.], dtype=float32)
    """
    images = jnp.moveaxis(x, axis, 1)
    channels = images.shape[1]
    if groups < 1 or channels % groups:
        raise ValueError(
            f"group_norm: `groups` must divide the {channels} channels of `x`, got "
            f"{groups}."
        )
    for name, v in (("weight", weight), ("bias", bias)):
        if v is not None and v.shape != (channels,):
            raise TypeError(
                f"group_norm: `{name}` must have shape ({channels},), got {v.shape}."
            )
    size = (groups, channels // groups)
    pixels = math.prod(images.shape[2:])
    weight, bias = (None if v is None else v.reshape(size) for v in (weight, bias))
    if axis % x.ndim == x.ndim - 1 and x.ndim > 2:
        pixels_first = x.reshape(x.shape[0], pixels, *size)
        y = channels_last_group_norm_p(pixels_first, weight, bias, eps=eps)
        return y.reshape(x.shape)
    rows = images.reshape(images.shape[0], *size, pixels)
    y = group_norm_p(rows, weight, bias, eps=eps)
    return jnp.moveaxis(y.reshape(images.shape), 1, axis)


def group_norm_fwd_reference(
    x: Float[Array, "... group channel pixel"],
    weight: Float[Array, "group channel"] | None,
    bias: Float[Array, "group channel"] | None,
    *,
    eps: float,
) -> tuple[
    Float[Array, "... group channel pixel"],
    Float[Array, "... group 1 1"],
    Float[Array, "... group 1 1"],
]:
    x32 = at_least_f32(x)
    mean, variance = mean_and_variance(x32, axis=(-2, -1))
    rstd = lax.rsqrt(variance + eps)
    y = (x32 - mean) * rstd
    if weight is not None:
        y = y * at_least_f32(weight)[..., None]
    if bias is not None:
        y = y + at_least_f32(bias)[..., None]
    return y.astype(x.dtype), mean, rstd


group_norm_reference = without_residuals(group_norm_fwd_reference)


def group_norm_bwd_reference(
    x: Float[Array, "... group channel pixel"],
    weight: Float[Array, "group channel"] | None,
    bias: Float[Array, "group channel"] | None,
    mean: Float[Array, "... group 1 1"],
    rstd: Float[Array, "... group 1 1"],
    dy: Float[Array, "... group channel pixel"],
    *,
    eps: float,
) -> tuple[
    Float[Array, "... group channel pixel"],
    Float[Array, "group channel"] | None,
    Float[Array, "group channel"] | None,
]:
    del eps  # already in rstd
    xhat, dy32 = (at_least_f32(x) - mean) * rstd, at_least_f32(dy)
    dxhat = dy32 if weight is None else dy32 * at_least_f32(weight)[..., None]
    along_mean = jnp.mean(dxhat, axis=(-2, -1), keepdims=True)
    along_xhat = xhat * jnp.mean(dxhat * xhat, axis=(-2, -1), keepdims=True)
    dx = rstd * (dxhat - along_mean - along_xhat)
    rest = (*range(x.ndim - 3), x.ndim - 1)  # all but group and channel
    dweight = None if weight is None else (dy32 * xhat).sum(rest).astype(weight.dtype)
    dbias = None if bias is None else dy32.sum(rest).astype(bias.dtype)
    return dx.astype(x.dtype), dweight, dbias


group_norm_p = kernel_primitive(
    group_norm_reference,
    fwd=group_norm_fwd_reference,
    bwd=group_norm_bwd_reference,
    replicated=("channel", "pixel"),  # the means run over them
)


def channels_last_group_norm_fwd_reference(
    x: Float[Array, "... pixel group channel"],
    weight: Float[Array, "group channel"] | None,
    bias: Float[Array, "group channel"] | None,
    *,
    eps: float,
) -> tuple[
    Float[Array, "... pixel group channel"],
    Float[Array, "... group 1 1"],
    Float[Array, "... group 1 1"],
]:
    rows = jnp.moveaxis(x, -3, -1)
    y, mean, rstd = group_norm_fwd_reference(rows, weight, bias, eps=eps)
    return jnp.moveaxis(y, -1, -3), mean, rstd


channels_last_group_norm_reference = without_residuals(
    channels_last_group_norm_fwd_reference
)


def channels_last_group_norm_bwd_reference(
    x: Float[Array, "... pixel group channel"],
    weight: Float[Array, "group channel"] | None,
    bias: Float[Array, "group channel"] | None,
    mean: Float[Array, "... group 1 1"],
    rstd: Float[Array, "... group 1 1"],
    dy: Float[Array, "... pixel group channel"],
    *,
    eps: float,
) -> tuple[
    Float[Array, "... pixel group channel"],
    Float[Array, "group channel"] | None,
    Float[Array, "group channel"] | None,
]:
    rows, drows = (jnp.moveaxis(v, -3, -1) for v in (x, dy))
    dx, dweight, dbias = group_norm_bwd_reference(
        rows, weight, bias, mean, rstd, drows, eps=eps
    )
    return jnp.moveaxis(dx, -1, -3), dweight, dbias


channels_last_group_norm_p = kernel_primitive(
    channels_last_group_norm_reference,
    fwd=channels_last_group_norm_fwd_reference,
    bwd=channels_last_group_norm_bwd_reference,
    replicated=("channel", "pixel"),  # the means run over them
)
