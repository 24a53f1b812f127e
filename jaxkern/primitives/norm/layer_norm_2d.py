"""Layer normalisation over the channels of each pixel  (https://arxiv.org/abs/2304.02643)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.norm.layer_norm import layer_norm


@check_arguments
def layer_norm_2d(
    x: Float[Array, "..."],
    weight: Float[Array, " channel"] | None = None,
    bias: Float[Array, " channel"] | None = None,
    *,
    eps: float = 1e-6,
    axis: int = 1,
) -> Float[Array, "..."]:
    """`layer_norm` over the channels of an image, for each pixel by itself.

        y = (x - mean) / sqrt(var + eps) * weight + bias     mean, var over `axis`

    The `LayerNorm2d` of SAM and ConvNeXt. Its eps is theirs; that of `layer_norm` is
    1e-5. The channels are moved to the end and back.

    Source: https://arxiv.org/abs/2304.02643.

    Args:
      x: `[b, channel, height, width]` with axis=1 (NCHW), `[b, height, width, channel]`
        with axis=-1 (NHWC), or any other shape with at least `axis` dims.
      weight: `[channel]`, or None for no scale.
      bias: `[channel]`, or None for no shift.
      eps: added to the biased variance, in units of x**2.
      axis: the dim of the channels.

    Returns:
      y: shape and dtype of x.

    Raises:
      TypeError: a dtype is not a float, or a dim differs between operands.
      ValueError: eps is negative or not finite.

    Example:
      >>> image = jnp.array([1.0, 2.0, 3.0, 6.0]).reshape(1, 2, 1, 2)  # NCHW
      >>> jaxkern.layer_norm_2d(image).reshape(2, 2)  # a column is a pixel
      Array([[-1., -1.],
             [ 1.,  1.]], dtype=float32)
    """
    y = layer_norm(jnp.moveaxis(x, axis, -1), weight, bias, eps=eps)
    return jnp.moveaxis(y, -1, axis)
