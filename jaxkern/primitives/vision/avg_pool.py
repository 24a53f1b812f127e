"""Average pooling: the mean of each window."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.vision.max_pool import Pairs, pooling_options
from jaxkern.primitives.vision.window import (
    Layout,
    Padding,
    Pair,
    check_fits,
    from_nchw,
    shifts,
    to_nchw,
)


@check_arguments
def avg_pool(
    x: Float[Array, "... height width"],
    window: int | Pair,
    *,
    stride: int | Pair | None = None,
    padding: Padding = 0,
    count_include_pad: bool = True,
    layout: Layout = "NCHW",
) -> Float[Array, "... out_height out_width"]:
    """Mean of each window of an image.

        y[p, q] = 1/n * sum over i, j of x[stride p + i - top, stride q + j - left]

    where n is the size of the window, or with count_include_pad=False the number of its
    pixels that lie in the image (Flax has this the other way round by default). Output
    size as max_pool; as `torch.nn.functional.avg_pool2d`. Sums in float32 (float64 for
    float64), rounded once. Rows are summed first, so a window costs its height plus its
    width. For the mean of the whole image take `jnp.mean`.

    Args:
      x: `[..., height, width]`, any float dtype, or with layout="NHWC"
        `[..., height, width, channel]`.
      window, stride, padding, layout: see max_pool.
      count_include_pad: padding counts as pixels of value 0.

    Returns:
      y: `[..., out_height, out_width]`, or that in layout; dtype of x.

    Raises:
      ValueError: an option out of range, or a window larger than the padded image.

    Example:
      >>> image = jnp.arange(8.0).reshape(2, 4)
      >>> jaxkern.avg_pool(image, 2)
      Array([[2.5, 4.5]], dtype=float32)
    """
    x = to_nchw("avg_pool", x, layout)
    windows, strides, padded = pooling_options("avg_pool", x, window, stride, padding)
    y = avg_pool_p(
        x,
        window=windows,
        stride=strides,
        padding=padded,
        count_include_pad=count_include_pad,
    )
    return from_nchw(y, layout)


def avg_pool_reference(
    x: Float[Array, "... height width"],
    *,
    window: Pair,
    stride: Pair,
    padding: Pairs,
    count_include_pad: bool,
) -> Float[Array, "... out_height out_width"]:
    check_fits("avg_pool", x.shape[-2:], window, padding)
    total, count = at_least_f32(x), window[0] * window[1]
    for axis in (-1, -2):
        first, *others = shifts(
            total, axis, window[axis], stride[axis], padding[axis], 0
        )
        total = sum(others, first)
    if not count_include_pad:
        rows, columns = (
            pixels_inside(x.shape[axis], window[axis], stride[axis], padding[axis])
            for axis in (-2, -1)
        )
        count = (rows[:, None] * columns).astype(total.dtype)
    return (total / count).astype(x.dtype)


def pixels_inside(
    size: int, window: int, stride: int, padding: Pair
) -> Int[Array, " windows"]:
    """How many pixels of each window along one axis lie in the image."""
    starts = jnp.arange(-padding[0], size + padding[1] - window + 1, stride)
    return jnp.minimum(starts + window, size) - jnp.maximum(starts, 0)


avg_pool_p = kernel_primitive(
    avg_pool_reference,
    replicated=("height", "width"),  # windows overlap
)
