"""Transposed two-dimensional convolution: the gradient of conv2d as an operator.

y[n, o, stride p + dilation k - padding] += x[n, c, p] weight[c, o, k]
(https://arxiv.org/abs/1603.07285, chapter 4)
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.vision.conv2d import check_channels, conv2d_p, to_oihw
from jaxkern.primitives.vision.window import Layout, Pair, from_nchw, pair, to_nchw


@check_arguments
def conv_transpose2d(
    x: Float[Array, "batch channel height width"],
    weight: Float[Array, "channel out_channel_of_group kernel_height kernel_width"],
    bias: Float[Array, " out_channel"] | None = None,
    *,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    output_padding: int | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    layout: Layout = "NCHW",
) -> Float[Array, "batch out_channel out_height out_width"]:
    """Transposed convolution, as `torch.nn.functional.conv_transpose2d`.

        y[n, o, stride p + dilation i - padding, ...] = bias[o] +
            sum over c, p, i of x[n, c, p, ...] weight[c, o, i, ...]

    with out_height = (height - 1) stride - 2 padding + dilation (kernel_height - 1) +
    output_padding + 1. It is `conv2d` over x with stride - 1 zeros between its pixels
    and the kernel turned by 180 degrees, and has its rules and kernels.
    (`jax.lax.conv_transpose` pads differently and knows no groups.)

    Source: https://arxiv.org/abs/1603.07285.

    Args:
      x: `[batch, channel, height, width]`, any float dtype, or
        `[batch, height, width, channel]` with layout="NHWC".
      weight: `[channel, out_channel / groups, kernel_height, kernel_width]`; with
        layout="NHWC" `[kernel_height, kernel_width, out_channel / groups, channel]`.
      bias: `[out_channel]`, or None.
      stride, dilation: one number, or (vertical, horizontal).
      padding: what `conv2d` would have added on both sides; here it is cut off.
      output_padding: rows and columns added at the end, less than stride or dilation.
      groups: out_channel and channel are cut into so many.
      layout: "NCHW" or "NHWC", of x and y.

    Returns:
      y: `[batch, out_channel, out_height, out_width]`, or that in layout; the dtype to
        which those of x and weight promote.

    Raises:
      TypeError: shapes or dtypes do not fit.
      ValueError: an option out of range.

    Example:
      >>> image, weight = jnp.ones((1, 3, 4, 4)), jnp.ones((3, 2, 2, 2))
      >>> jaxkern.conv_transpose2d(image, weight, stride=2).shape
      (1, 2, 8, 8)
    """
    op = "conv_transpose2d"
    x, weight = to_nchw(op, x, layout), to_oihw(op, weight, layout)
    channels, out, *kernel = weight.shape
    check_channels(op, x, channels, out * groups, groups)
    strides, dilations = pair(op, "stride", stride), pair(op, "dilation", dilation)
    cut, extra = (
        pair(op, "padding", padding, 0),
        pair(op, "output_padding", output_padding, 0),
    )
    if any(e >= max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)):
        raise ValueError(
            f"{op}: `output_padding` must be less than stride or dilation, got "
            f"{output_padding}."
        )
    if channels % groups:
        raise ValueError(
            f"{op}: `groups` must divide the {channels} channels of `x`, got {groups}."
        )
    # [g*i, o, ...] to [g*o, i, ...]: within each group, in and out change places
    weight = weight.reshape(groups, channels // groups, out, *kernel)
    weight = weight.swapaxes(1, 2).reshape(groups * out, channels // groups, *kernel)
    before = [d * (k - 1) - p for k, d, p in zip(kernel, dilations, cut, strict=True)]
    y = conv2d_p(
        x,
        jnp.flip(weight, (2, 3)),
        bias,
        stride=(1, 1),
        padding=tuple((n, n + e) for n, e in zip(before, extra, strict=True)),
        dilation=dilations,
        input_dilation=strides,
    )
    return from_nchw(y, layout)
