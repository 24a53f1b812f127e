"""rms_norm_quantized: rounding, scales of rows and blocks, the sum, gradients."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkern import add_rms_norm_quantized, rms_norm_quantized
from jaxkern.testing.checks import bf16, case, f32

PLAIN = dict(eps=1e-6, offset=0.0)
CASES = {
    "rms_norm_quantized": [
        case("plain", x=f32(4, 16), weight=f32(16), format="int8", block=2, **PLAIN),
        case("row", x=f32(3, 7), format="e4m3fn", block=7, **PLAIN),
        case(
            "llama3_8b",
            full=True,
            x=f32(4, 4096),
            weight=f32(4096),
            format="e4m3fn",
            block=128,
            **PLAIN,
        ),
    ],
    "add_rms_norm_quantized": [
        case(
            "plain",
            x=f32(4, 2, 8),
            residual=f32(4, 2, 8),
            weight=f32(8),
            format="e4m3fn",
            block=8,
            eps=0.1,
            offset=1.0,
        ),
        case(
            "odd",
            x=f32(3, 7),
            residual=bf16(3, 7),
            format="int8",
            block=3,
            **PLAIN,
        ),
    ],
}


def normed(x, weight, eps):
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("block", [None, 4, 5])
@pytest.mark.parametrize("format, largest", [("e4m3fn", 448), ("int8", 127)])
def test_codes_and_scales_match_the_formula(format, largest, block):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(6, 12)), rng.normal(size=12)
    codes, scales = rms_norm_quantized(
        jnp.float32(x), jnp.float32(weight), format=format, block=block, eps=0.1
    )
    y = normed(x, weight, 0.1)
    width = block or 12
    assert scales.shape == (6, -(-12 // width)) and scales.dtype == jnp.float32
    for k in range(scales.shape[1]):
        part = y[:, k * width : (k + 1) * width]
        scale = np.abs(part).max(-1) / largest
        np.testing.assert_allclose(scales[:, k], scale, rtol=1e-5)
        if format == "int8":
            expected = np.rint(part / scale[:, None]).astype(np.int8)
        else:
            expected = (part / scale[:, None]).astype(ml_dtypes.float8_e4m3fn)
            expected = expected.view(np.uint8)
        np.testing.assert_array_equal(codes[:, k * width : (k + 1) * width], expected)


def test_the_largest_element_has_the_largest_code():
    x = jnp.asarray([[1.0, -8.0, 2.0, 0.0]])
    codes, _ = rms_norm_quantized(x, format="int8")
    np.testing.assert_array_equal(codes, [[16, -127, 32, 0]])
    codes, _ = rms_norm_quantized(x)
    values = np.asarray(codes).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(values, [[56, -448, 112, 0]])


def test_a_row_of_zeros_has_scale_one():
    for format in ("int8", "e4m3fn"):
        codes, scales = rms_norm_quantized(jnp.zeros((2, 4)), format=format, block=2)
        np.testing.assert_array_equal(codes, np.zeros((2, 4)))
        np.testing.assert_array_equal(scales, np.ones((2, 2)))


def test_the_sum_is_returned_and_has_its_gradient():
    rng = np.random.default_rng(1)
    x, residual = jnp.float32(rng.normal(size=(2, 3, 8)))
    codes, scales, total = add_rms_norm_quantized(x, residual)
    expected = rms_norm_quantized(x + residual)
    np.testing.assert_array_equal(codes, expected[0])
    np.testing.assert_array_equal(scales, expected[1])
    np.testing.assert_array_equal(total, x + residual)
    dx = jax.grad(lambda x: (add_rms_norm_quantized(x, residual)[2] * x).sum())(x)
    np.testing.assert_allclose(dx, 2 * x + residual, rtol=1e-6)


def test_codes_are_constants_and_scales_follow_the_largest_element():
    x = jnp.asarray([[1.0, -3.0, 2.0]])
    dx = jax.grad(lambda x: rms_norm_quantized(x, format="int8")[1].sum())(x)
    rms = np.sqrt(14 / 3)
    expected = (np.asarray([[0, -1, 0]]) - 3 * np.asarray(x) / 14) / rms / 127
    np.testing.assert_allclose(dx, expected, rtol=1e-4)


def test_every_error_says_what_to_do():
    x = jnp.zeros((2, 8))
    with pytest.raises(ValueError, match="`format` must be one of e4m3fn, int8"):
        rms_norm_quantized(x, format="int4")
    with pytest.raises(ValueError, match="`block` must be at least 1 or None, got 0"):
        add_rms_norm_quantized(x, x, block=0)
