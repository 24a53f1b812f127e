"""Convolution of 8-bit images with 8-bit weights, summed in int32.

y = x_scale * scale[o] * sum of (x_code - x_zero) (code - zero[o]) + bias[o]
(https://arxiv.org/abs/1712.05877)
"""

import itertools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int8

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
from jaxkern.primitives.vision.conv2d import (
    Pairs,
    check_channels,
    reach_of,
    to_oihw,
)
from jaxkern.primitives.vision.window import (
    Layout,
    Padding,
    Pair,
    check_fits,
    from_nchw,
    pads,
    pair,
    to_nchw,
)


@check_arguments
def int8_conv2d(
    x_codes: Int8[Array, "batch channel height width"],
    x_scale: Float[Array, ""],
    x_zero: Int[Array, ""],
    codes: Int8[Array, "out_channel channel_of_group kernel_height kernel_width"],
    scales: Float[Array, " out_channel"],
    zeros: Int[Array, " out_channel"] | None = None,
    bias: Float[Array, " out_channel"] | None = None,
    *,
    stride: int | Pair = 1,
    padding: Padding = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    layout: Layout = "NCHW",
) -> Float[Array, "batch out_channel out_height out_width"]:
    """`conv2d` of x_scale (x_codes - x_zero) and scales (codes - zeros), in integers.

        y[n, o, p, q] = bias[o] + x_scale scales[o] * sum over c, i, j of
            (x_codes[n, c', ...] - x_zero) (codes[o, c, i, j] - zeros[o])

    with the window and the groups of `conv2d`. The image is padded with x_zero, which
    stands for 0. Products and sums are exact in int32 for windows of up to 2**15 codes
    (channels of a group times kernel pixels); then one rounding each for the scales
    and the bias. Unsigned codes: subtract 128 from codes and zero points.

    Differentiable in x_scale, scales and bias. For a gradient to images and weights
    round them with `fake_quant` and call `conv2d`.

    Source: https://arxiv.org/abs/1712.05877.

    Args:
      x_codes: `[batch, channel, height, width]` int8, or
        `[batch, height, width, channel]` with layout="NHWC".
      x_scale: scalar, one scale for the whole image.
      x_zero: scalar int, the code of 0, in [-128, 127].
      codes: `[out_channel, channel / groups, kernel_height, kernel_width]` int8; with
        layout="NHWC" `[kernel_height, kernel_width, channel / groups, out_channel]`.
      scales: `[out_channel]`.
      zeros: `[out_channel]` int in [-128, 127], or None for 0.
      bias: `[out_channel]`, or None; of the float result, not an int32 code.
      stride, padding, dilation, groups, layout: as for `conv2d`.

    Returns:
      y: `[batch, out_channel, out_height, out_width]`, or that in layout; the dtype of
        x_scale. Requantise it with `quantize_int`.

    Raises:
      TypeError: shapes or dtypes do not fit.
      ValueError: an option out of range, or a kernel larger than the padded image.

    Example:
      >>> codes, scales = jnp.ones((1, 1, 2, 2), jnp.int8), jnp.array([2.0])
      >>> scale, zero = jnp.float32(0.5), jnp.int32(-1)
      >>> jaxkern.int8_conv2d(codes, scale, zero, codes, scales).item()
      8.0
    """
    op = "int8_conv2d"
    x_codes, codes = to_nchw(op, x_codes, layout), to_oihw(op, codes, layout)
    check_channels(op, x_codes, codes.shape[1] * groups, codes.shape[0], groups)
    strides, dilations = pair(op, "stride", stride), pair(op, "dilation", dilation)
    reach = reach_of(codes, dilations)
    y = int8_conv2d_p(
        x_codes,
        x_scale,
        x_zero,
        codes,
        scales,
        zeros,
        bias,
        stride=strides,
        padding=pads(op, padding, x_codes.shape[2:], reach, strides),
        dilation=dilations,
    )
    return from_nchw(y, layout)


def int8_conv2d_reference(
    x_codes: Int8[Array, "batch g*i height width"],
    x_scale: Float[Array, ""],
    x_zero: Int[Array, ""],
    codes: Int8[Array, "g*o i kernel_height kernel_width"],
    scales: Float[Array, " g*o"],
    zeros: Int[Array, " g*o"] | None,
    bias: Float[Array, " g*o"] | None,
    *,
    stride: Pair,
    padding: Pairs,
    dilation: Pair,
) -> Float[Array, "batch g*o out_height out_width"]:
    total = integer_convolution(
        x_codes, x_zero, codes, zeros, stride, padding, dilation
    )
    scale = at_least_f32(x_scale) * at_least_f32(scales)
    y = total.astype(scale.dtype) * scale[:, None, None]
    if bias is not None:
        y = y + at_least_f32(bias)[:, None, None]
    return y.astype(x_scale.dtype)


def integer_convolution(x, x_zero, codes, zeros, stride, padding, dilation):
    """sum of (x - x_zero) (code - zero) in int32, exact though its parts may wrap.

    Products take int8 as it is, so the zero points come in by
        sum (x - x_zero) (w - zero) = sum x w - x_zero sum w - zero sum (x - x_zero).
    A convolution instruction of integers exists on few platforms, so the kernel's
    pixels are taken one after the other.
    """
    batch, channels = x.shape[:2]
    out_channels, i, *kernel = codes.shape
    reach = reach_of(codes, dilation)
    check_fits("int8_conv2d", x.shape[2:], reach, padding)
    x = lax.pad(x, x_zero.astype(x.dtype), [(0, 0, 0)] * 2 + [(*p, 0) for p in padding])
    groups = channels // i if i else 1
    x = x.reshape(batch, groups, i, *x.shape[2:])
    w = codes.reshape(groups, out_channels // max(groups, 1), i, *kernel)
    x_zero = x_zero.astype(jnp.int32)

    def seen_by(*pixel):
        seen = x
        for axis in (0, 1):
            start, n = pixel[axis] * dilation[axis], x.shape[3 + axis] - reach[axis]
            seen = lax.slice_in_dim(seen, start, start + n + 1, stride[axis], 3 + axis)
        return seen  # [batch g i out_height out_width]

    total = jnp.int32(0)
    for row, column in itertools.product(*map(range, kernel)):
        seen, weight = seen_by(row, column), w[..., row, column]
        total += jnp.einsum(
            "bgipq,goi->bgopq", seen, weight, preferred_element_type=jnp.int32
        )
        total -= x_zero * weight.sum(2, dtype=jnp.int32)[..., None, None]
        if zeros is not None:
            zero = zeros.astype(jnp.int32).reshape(*w.shape[:2], 1, 1)
            total -= zero * jnp.sum(seen - x_zero, axis=2, dtype=jnp.int32)[:, :, None]
    return total.reshape(batch, out_channels, *total.shape[3:])


int8_conv2d_p = kernel_primitive(
    int8_conv2d_reference,
    # a window may reach anywhere, and a result needs every channel of its group
    replicated=("i", "height", "width", "kernel_height", "kernel_width"),
)
