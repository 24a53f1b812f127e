"""int8_conv2d: sums of integers pixel by pixel, and conv2d of what the codes mean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import conv2d, int8_conv2d
from jaxkern.testing.checks import Spec, case, f32, i32, uniform


def codes(*shape, low=-128, high=128):
    return Spec(shape, np.int8, lambda rng, s: rng.integers(low, high, s))


OPTIONS = dict(stride=(1, 1), padding=((0, 0), (0, 0)), dilation=(1, 1))
CASES = [
    case(
        "plain",
        full=True,
        x_codes=codes(1, 4, 3, 3, low=-3, high=3),
        x_scale=uniform(low=0.1),
        x_zero=i32(low=-3, high=3),
        codes=codes(2, 2, 2, 2, low=-3, high=3),
        scales=uniform(2, low=0.1, high=0.2),
        zeros=i32(2, low=-3, high=3),
        bias=f32(2),
        **OPTIONS | dict(padding=((1, 0), (0, 1))),
    ),
    case(
        "resnet",
        full=True,
        x_codes=codes(2, 16, 14, 14),
        x_scale=uniform(low=0.1),
        x_zero=i32(low=-128, high=127),
        codes=codes(8, 16, 3, 3),
        scales=uniform(8, low=0.1),
        **OPTIONS | dict(stride=(2, 2), padding=((1, 1), (1, 1))),
    ),
]


def draw(rng, channels, out_channels, groups):
    x = rng.integers(-128, 128, (2, channels, 6, 7)).astype(np.int8)
    w = rng.integers(-128, 128, (out_channels, channels // groups, 3, 2))
    zeros = rng.integers(-128, 128, out_channels).astype(np.int32)
    scales, bias = rng.uniform(0.5, 2, (2, out_channels)).astype(np.float32)
    return x, w.astype(np.int8), scales, zeros, bias


@pytest.mark.parametrize(
    "layout", ["NCHW", pytest.param("NHWC", marks=pytest.mark.full)]
)
def test_sums_of_integers_in_int64(layout):
    x, w, scales, zeros, bias = draw(np.random.default_rng(0), 4, 6, groups=2)
    x_zero, stride, dilation = -128, (2, 1), (1, 2)
    padded = np.full((2, 4, 8, 8), x_zero, np.int64)  # one row each, one column left
    padded[:, :, 1:7, 1:] = x
    expected = np.zeros((2, 6, 3, 6), np.int64)
    for o, p, q, c, i, j in np.ndindex(6, 3, 6, 2, 3, 2):
        seen = padded[:, o // 3 * 2 + c, 2 * p + i, q + 2 * j]
        expected[:, o, p, q] += (seen - x_zero) * (int(w[o, c, i, j]) - zeros[o])
    expected = expected * (0.5 * scales)[:, None, None] + bias[:, None, None]
    if layout == "NHWC":
        x, w, expected = x.transpose(0, 2, 3, 1), w.transpose(2, 3, 1, 0), expected
        expected = expected.transpose(0, 2, 3, 1)
    y = jax.jit(
        lambda *a: int8_conv2d(
            *a,
            stride=stride,
            padding=((1, 1), (1, 0)),
            dilation=dilation,
            groups=2,
            layout=layout,
        )
    )(x, jnp.float32(0.5), np.int32(x_zero), w, scales, zeros, bias)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


@pytest.mark.full
def test_it_is_conv2d_of_what_the_codes_mean_and_so_are_its_gradients():
    x, w, scales, zeros, bias = draw(np.random.default_rng(1), 3, 4, groups=1)

    def of_floats(x_scale, scales, bias):
        image = x_scale * (x.astype(np.float32) - 7)
        weight = scales[:, None, None, None] * (w - zeros[:, None, None, None])
        return conv2d(image, weight.astype(jnp.float32), bias, padding="SAME")

    def of_codes(x_scale, scales, bias):
        zero = np.int32(7)
        return int8_conv2d(x, x_scale, zero, w, scales, zeros, bias, padding="SAME")

    values = (jnp.float32(0.25), jnp.asarray(scales), jnp.asarray(bias))
    y, pull = jax.vjp(of_codes, *values)
    expected, pull_expected = jax.vjp(of_floats, *values)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=0.1)
    dy = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
    for d, e in zip(pull(dy), pull_expected(dy), strict=True):
        np.testing.assert_allclose(d, e, rtol=1e-3)


@pytest.mark.full
def test_the_largest_sums_do_not_overflow():
    ones = np.ones((1, 2**13, 2, 2), np.int8)
    y = int8_conv2d(
        127 * ones, jnp.float32(1), np.int32(-128), -128 * ones, jnp.ones(1),
        np.array([127]),
    )  # fmt: skip
    assert y.shape == (1, 1, 1, 1)
    np.testing.assert_allclose(y[0, 0, 0, 0], -(2.0**15) * 255 * 255, rtol=1e-7)


def test_errors_name_the_operand():
    x, w, scales, *_ = draw(np.random.default_rng(0), 4, 6, groups=2)
    one, zero = jnp.float32(1), np.int32(0)
    with pytest.raises(TypeError, match="int8_conv2d: `codes` must have a dtype of"):
        int8_conv2d(x, one, zero, w.astype(np.int32), scales, groups=2)
    with pytest.raises(TypeError, match="four-dimensional with the 2 channels"):
        int8_conv2d(x, one, zero, w, scales)
    with pytest.raises(ValueError, match="int8_conv2d: a window over 3 x 2 pixels"):
        int8_conv2d(x[:, :, :2], one, zero, w, scales, groups=2)
