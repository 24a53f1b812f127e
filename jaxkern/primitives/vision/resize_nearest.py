"""Enlarges images by whole factors: y[s h + a, s w + b] = x[h, w]."""

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.vision.window import Layout, Pair, from_nchw, pair, to_nchw


@check_arguments
def resize_nearest(
    x: Shaped[Array, "... height width"],
    scale: int | Pair = 2,
    *,
    layout: Layout = "NCHW",
) -> Shaped[Array, "... out_height out_width"]:
    """Repeats every pixel `scale` times in both directions.

        y[..., scale h + a, scale w + b] = x[..., h, w]      for a, b < scale

    Equal to `jax.image.resize(x, shape, "nearest")` for whole factors. It is a
    broadcast, so its gradient is a sum over each block and not a scatter. For other
    sizes, and for antialiased bilinear resizing, JAX's function is the operator:
    `jax.image.resize(x, shape, "linear")`.

    Args:
      x: `[..., height, width]`, any dtype, or with layout="NHWC"
        `[..., height, width, channel]`.
      scale: one number, or (vertical, horizontal).
      layout: "NCHW" or "NHWC".

    Returns:
      y: `[..., scale * height, scale * width]`, or that in layout; dtype of x.

    Raises:
      ValueError: an option out of range.

    Example:
      >>> jaxkern.resize_nearest(jnp.array([[1, 2]]))
      Array([[1, 1, 2, 2],
             [1, 1, 2, 2]], dtype=int32)
    """
    down, right = pair("resize_nearest", "scale", scale)
    x = to_nchw("resize_nearest", x, layout)
    *lead, height, width = x.shape
    blocks = jnp.broadcast_to(
        x[..., :, None, :, None], (*lead, height, down, width, right)
    )
    return from_nchw(blocks.reshape(*lead, height * down, width * right), layout)
