"""Max pooling: the largest pixel of each window; its gradient goes to the first one."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import kernel_primitive
from jaxkern.primitives.vision.window import (
    Layout,
    Padding,
    Pair,
    check_fits,
    from_nchw,
    pads,
    pair,
    shifts,
    to_nchw,
)

Pairs = tuple[Pair, Pair]


@check_arguments
def max_pool(
    x: Float[Array, "... height width"],
    window: int | Pair,
    *,
    stride: int | Pair | None = None,
    padding: Padding = 0,
    layout: Layout = "NCHW",
) -> Float[Array, "... out_height out_width"]:
    """Largest value of each window of an image.

        y[p, q] = max over i, j of x[stride p + i - top, stride q + j - left]

    with out_height = (height + top + bottom - window) // stride + 1, as
    `torch.nn.functional.max_pool2d`. Padding never wins. The gradient goes to the first
    maximum of a window in row-major order; NaN counts as larger than any number. The
    maxima of rows are taken first, so a window costs its height plus its width.

    Args:
      x: `[..., height, width]`, any float dtype, or with layout="NHWC"
        `[..., height, width, channel]`.
      window: one number, or (height, width).
      stride: the window unless given.
      padding: as in conv2d; less than the window on each side, so that every window has
        a pixel of the image.
      layout: "NCHW" or "NHWC".

    Returns:
      y: `[..., out_height, out_width]`, or that in layout; dtype of x.

    Raises:
      ValueError: an option out of range, or a window larger than the padded image.

    Example:
      >>> image = jnp.arange(8.0).reshape(2, 4)
      >>> jaxkern.max_pool(image, 2)
      Array([[5., 7.]], dtype=float32)
    """
    x = to_nchw("max_pool", x, layout)
    windows, strides, padded = pooling_options("max_pool", x, window, stride, padding)
    y = max_pool_p(x, window=windows, stride=strides, padding=padded)
    return from_nchw(y, layout)


def pooling_options(op, x, window, stride, padding) -> tuple[Pair, Pair, Pairs]:
    windows = pair(op, "window", window)
    strides = windows if stride is None else pair(op, "stride", stride)
    padded = pads(op, padding, x.shape[-2:], windows, strides)
    if any(max(p) >= n for p, n in zip(padded, windows, strict=True)):
        raise ValueError(
            f"{op}: `padding` must be less than the window {windows}, got {padding!r}."
        )
    return windows, strides, padded


def max_pool_reference(
    x: Float[Array, "... height width"], *, window: Pair, stride: Pair, padding: Pairs
) -> Float[Array, "... out_height out_width"]:
    check_fits("max_pool", x.shape[-2:], window, padding)
    for axis in (-1, -2):
        x, _ = first_maximum(x, axis, window[axis], stride[axis], padding[axis])
    return x


def max_pool_bwd_reference(
    x: Float[Array, "... height width"],
    dy: Float[Array, "... out_height out_width"],
    *,
    window: Pair,
    stride: Pair,
    padding: Pairs,
) -> Float[Array, "... height width"]:
    options = [(axis, window[axis], stride[axis], padding[axis]) for axis in (-1, -2)]
    along_row, column = first_maximum(x, *options[0])
    _, row = first_maximum(along_row, *options[1])
    dy = spread(dy, row, x.shape[-2], *options[1])
    return spread(dy, column, x.shape[-1], *options[0])


def first_maximum(
    x: Float[Array, "..."], axis: int, window: int, stride: int, padding: Pair
) -> tuple[Float[Array, "..."], Int[Array, "..."]]:
    """The maximum of each window along one axis, and its first place there."""
    best, *others = shifts(x, axis, window, stride, padding, -jnp.inf)
    place = jnp.zeros_like(best, jnp.int32)
    for k, other in enumerate(others, 1):
        larger = (other > best) | (jnp.isnan(other) & ~jnp.isnan(best))
        best = jnp.where(larger, other, best)
        place = jnp.where(larger, k, place)
    return best, place


def spread(dy, place, size, axis, window, stride, padding):
    """Adds each element of dy to where `place` says in its window: x's gradient."""
    reach = (dy.shape[axis] - 1) * stride + 1
    config = [(0, 0, 0)] * dy.ndim
    parts = []
    for k in range(window):
        first = k - padding[0]
        config[axis] = (first, size - first - reach, stride - 1)
        part = jnp.where(place == k, dy, 0)
        parts.append(lax.pad(part, jnp.zeros((), dy.dtype), config))
    return sum(parts[1:], parts[0])


max_pool_p = kernel_primitive(
    max_pool_reference,
    bwd=max_pool_bwd_reference,
    replicated=("height", "width"),  # windows overlap
)
