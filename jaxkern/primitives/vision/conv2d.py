"""Two-dimensional convolution (cross-correlation), with strides, dilation and groups.

y[n, o, p] = sum over c, k of x[n, c, stride p + dilation k - padding] weight[o, c, k]
(https://arxiv.org/abs/1603.07285)
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxkern.primitives.check_arguments import check_arguments
from jaxkern.primitives.kernel_primitive import at_least_f32, kernel_primitive
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

Pairs = tuple[Pair, Pair]


@check_arguments
def conv2d(
    x: Float[Array, "batch channel height width"],
    weight: Float[Array, "out_channel channel_of_group kernel_height kernel_width"],
    bias: Float[Array, " out_channel"] | None = None,
    *,
    stride: int | Pair = 1,
    padding: Padding = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    layout: Layout = "NCHW",
) -> Float[Array, "batch out_channel out_height out_width"]:
    """Convolution of images, as `torch.nn.functional.conv2d`; the kernel is not turned.

        y[n, o, p, q] = bias[o] + sum over c, i, j of weight[o, c, i, j] *
            x[n, c', stride p + dilation i - top, stride q + dilation j - left]

    where c' is c within the group of o, and x is zero outside the image; out_height is
    (height + top + bottom - dilation (kernel_height - 1) - 1) // stride + 1. Computed
    in float32 (float64 for float64) and rounded once, after the bias.

    Source: https://arxiv.org/abs/1603.07285.

    Args:
      x: `[batch, channel, height, width]`, any float dtype, or
        `[batch, height, width, channel]` with layout="NHWC".
      weight: `[out_channel, channel / groups, kernel_height, kernel_width]`; with
        layout="NHWC" as Flax and TensorFlow store it,
        `[kernel_height, kernel_width, channel / groups, out_channel]`.
      bias: `[out_channel]`, or None.
      stride, dilation: one number, or (vertical, horizontal).
      padding: one number, (vertical, horizontal), ((top, bottom), (left, right)),
        "VALID" for none, or "SAME": out_height = ceil(height / stride), of an odd total
        one more at the end.
      groups: out_channel and channel are cut into so many; `channel` for a depthwise
        convolution.
      layout: "NCHW" or "NHWC", of x and y.

    Returns:
      y: `[batch, out_channel, out_height, out_width]`, or that in layout; the dtype to
        which those of x and weight promote.

    Raises:
      TypeError: shapes or dtypes do not fit.
      ValueError: an option out of range, or a kernel larger than the padded image.

    Example:
      >>> image, weight = jnp.ones((1, 3, 8, 8)), jnp.ones((4, 3, 3, 3))
      >>> jaxkern.conv2d(image, weight, stride=2, padding=1).shape
      (1, 4, 4, 4)
      >>> depthwise = jnp.ones((3, 1, 3, 3))
      >>> jaxkern.conv2d(image, depthwise, groups=3)[0, :, 0, 0]
      Array([9., 9., 9.], dtype=float32)
    """
    x, weight = to_nchw("conv2d", x, layout), to_oihw("conv2d", weight, layout)
    check_channels("conv2d", x, weight.shape[1] * groups, weight.shape[0], groups)
    strides, dilations = (
        pair("conv2d", "stride", stride),
        pair("conv2d", "dilation", dilation),
    )
    sizes = x.shape[2:]
    y = conv2d_p(
        x,
        weight,
        bias,
        stride=strides,
        padding=pads("conv2d", padding, sizes, reach_of(weight, dilations), strides),
        dilation=dilations,
        input_dilation=(1, 1),
    )
    return from_nchw(y, layout)


def to_oihw(op: str, weight: jax.Array, layout: str) -> jax.Array:
    if weight.ndim != 4:
        raise TypeError(f"{op}: `weight` must have four dims, got {weight.shape}.")
    return weight if layout == "NCHW" else weight.transpose(3, 2, 0, 1)


def check_channels(op: str, x, channels: int, out_channels: int, groups: int) -> None:
    if x.ndim != 4 or x.shape[1] != channels:
        raise TypeError(
            f"{op}: `x` must be four-dimensional with the {channels} channels that "
            f"`weight` and groups={groups} ask for, got {x.shape} (as NCHW)."
        )
    if groups < 1 or out_channels % groups:
        raise ValueError(
            f"{op}: `groups` must divide the {out_channels} channels of the result, "
            f"got {groups}."
        )


def reach_of(weight: jax.Array, dilation: Pair) -> Pair:
    """Over how many pixels a dilated kernel reaches."""
    sizes = zip(weight.shape[2:], dilation, strict=True)
    height, width = (d * (k - 1) + 1 for k, d in sizes)
    return height, width


def conv2d_reference(
    x: Float[Array, "batch g*i height width"],
    weight: Float[Array, "g*o i kernel_height kernel_width"],
    bias: Float[Array, " g*o"] | None,
    *,
    stride: Pair,
    padding: Pairs,
    dilation: Pair,
    input_dilation: Pair,
) -> Float[Array, "batch g*o out_height out_width"]:
    y = convolve(x, weight, stride, padding, dilation, input_dilation)
    if bias is not None:
        y = y + at_least_f32(bias)[:, None, None]
    return y.astype(jnp.result_type(x, weight))


def conv2d_bwd_reference(
    x: Float[Array, "batch g*i height width"],
    weight: Float[Array, "g*o i kernel_height kernel_width"],
    bias: Float[Array, " g*o"] | None,
    dy: Float[Array, "batch g*o out_height out_width"],
    *,
    stride: Pair,
    padding: Pairs,
    dilation: Pair,
    input_dilation: Pair,
) -> tuple[
    Float[Array, "batch g*i height width"],
    Float[Array, "g*o i kernel_height kernel_width"],
    Float[Array, " g*o"] | None,
]:
    def products(x, weight):
        return convolve(x, weight, stride, padding, dilation, input_dilation)

    dy32 = at_least_f32(dy)
    # JAX's transposes: with one group convolutions again, in the forms that cuDNN knows
    dx, dweight = jax.vjp(products, x, weight)[1](dy32)
    dbias = None if bias is None else dy32.sum((0, 2, 3)).astype(bias.dtype)
    return dx, dweight, dbias


def convolve(x, weight, stride, padding, dilation, input_dilation):
    """The convolution without bias, not yet rounded.

    `input_dilation` - 1 zeros stand between the pixels of x. The number of groups is
    read from the shapes, so that a device with some of them finds its own.
    """
    sizes = zip(x.shape[2:], input_dilation, strict=True)
    dilated = [a * (n - 1) + 1 if n else 0 for n, a in sizes]
    check_fits("conv2d", dilated, reach_of(weight, dilation), padding)
    # bfloat16 operands would be faster, but many shapes fail with them on CUDA
    # (https://github.com/jax-ml/jax/issues/37922)
    dtype = jnp.result_type(x, weight, jnp.float32)
    grouped = x.shape[1] != weight.shape[1] and x.size > 0 and weight.size > 0
    f = convolve_groups if grouped else convolution
    return f(
        x.astype(dtype), weight.astype(dtype), stride, padding, dilation, input_dilation
    )


def convolution(x, weight, stride, padding, dilation, input_dilation):
    return lax.conv_general_dilated(
        x,
        weight,
        stride,
        padding,
        lhs_dilation=input_dilation,
        rhs_dilation=dilation,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
        feature_group_count=x.shape[1] // weight.shape[1] if x.shape[1] else 1,
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4, 5))
def convolve_groups(x, weight, stride, padding, dilation, input_dilation):
    """The convolution of several groups, whose derivatives XLA partitions rightly.

    JAX's gradient for the weights of groups is a convolution with a
    `batch_group_count`. With the batch cut over one axis of a mesh of several, XLA sums
    its parts over all axes: the gradient is too large by the size of the others.
    """
    return convolution(x, weight, stride, padding, dilation, input_dilation)


@convolve_groups.defjvp
def jvp_of_groups(stride, padding, dilation, input_dilation, primals, tangents):
    (x, weight), (dx, dweight) = primals, tangents
    options = (stride, padding, dilation, input_dilation)
    y = convolve_groups(x, weight, *options)
    of_weight = sum_over_offsets(x, dweight, *options)
    return y, convolve_groups(dx, weight, *options) + of_weight


def sum_over_offsets(x, weight, stride, padding, dilation, input_dilation):
    """The same convolution as a sum of products, one for each pixel of the kernel."""
    (n, channels), (out, i) = x.shape[:2], weight.shape[:2]
    g = channels // i
    border = zip(padding, input_dilation, strict=True)
    x = whole_images(x)
    borders = [(0, 0, 0)] * 2 + [(*ends, a - 1) for ends, a in border]
    images = lax.pad(x, jnp.zeros((), x.dtype), borders)
    sizes = images.shape[2:]
    images = images.reshape(n, g, i, *sizes)
    kernels = jnp.moveaxis(weight.reshape(g, out // g, i, -1), -1, 0)
    rows, columns = (
        d * place.ravel()
        for d, place in zip(dilation, np.indices(weight.shape[2:]), strict=True)
    )
    # one pixel of the kernel meets so many, counted with those between the strides
    spans = [
        (m - r) // s * s + 1
        for m, r, s in zip(sizes, reach_of(weight, dilation), stride, strict=True)
    ]

    @jax.checkpoint  # saves no copy of the images for each pixel of the kernel
    def product(images, row, column, kernel):
        seen = lax.dynamic_slice_in_dim(images, row, spans[0], axis=3)
        seen = lax.dynamic_slice_in_dim(seen, column, spans[1], axis=4)
        seen = seen[..., :: stride[0], :: stride[1]]
        return jnp.einsum("ngihw,goi->ngohw", seen, kernel)

    def add(total, offset):
        return total + product(images, *offset), None

    first = product(images, rows[0], columns[0], kernels[0])
    y, _ = lax.scan(add, first, (rows[1:], columns[1:], kernels[1:]))
    return y.reshape(n, out, *y.shape[3:])


def whole_images(x):
    """On an explicit mesh: no image is cut, for its border may divide unevenly."""
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty or not sharding.mesh.explicit_axes:
        return x
    return jax.sharding.reshard(x, sharding.update(spec=P(*sharding.spec[:2])))


conv2d_p = kernel_primitive(
    conv2d_reference,
    bwd=conv2d_bwd_reference,
    # a window may reach anywhere, and a result needs every channel of its group
    replicated=("i", "height", "width", "kernel_height", "kernel_width"),
)
