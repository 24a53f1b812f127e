"""8-bit floats against ml_dtypes, block scales against loops, products in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkern import (
    FP8Tensor,
    dequantize,
    grouped_matmul,
    linear,
    quantize_fp8,
    quantized_embedding,
    quantized_matmul,
)
from jaxkern.primitives.float8 import decode_float8, encode_float8
from jaxkern.testing.checks import Spec, bf16, case, f32, i32, uniform

FORMATS = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e4m3": ml_dtypes.float8_e4m3,
    "e5m2": ml_dtypes.float8_e5m2,
}


def finite_codes(*shape: int) -> Spec:
    """Codes of no more than 1, which no format reads as NaN."""
    return Spec(shape, np.uint8, lambda rng, s: rng.integers(0x10, 0x39, s))


WIDE = {"format": "e4m3fn", "dtype": None}
EXACT = {"format": "e4m3fn", "compute_dtype": None}
CASES = {
    "quantize_fp8": [
        case("plain", full=True, w=f32(8, 12), block=(2, 3), format="e4m3fn"),
        case("whole", full=True, w=f32(2, 4, 8), block=(4, 8), format="e5m2"),
        case("rows", full=True, w=bf16(8, 6), block=(1, 6), format="e4m3"),
    ],
    "dequantize_fp8": [
        case("plain", codes=finite_codes(8, 12), scales=uniform(2, 3), **WIDE),
        case("stack", codes=finite_codes(2, 4, 3), scales=uniform(2, 1, 1), **WIDE),
    ],
    "fp8_matmul": [
        case("plain", x=f32(4, 8), codes=finite_codes(8, 8), scales=f32(4, 2), **EXACT),
        case("empty", x=f32(0, 4), codes=finite_codes(3, 4), scales=f32(1, 1), **EXACT),
        case(
            "deepseek_v3_down",
            x=bf16(2, 2048),
            codes=finite_codes(7168, 2048),
            scales=uniform(56, 16),
            full=True,
            **EXACT,
        ),
    ],
    "fp8_embedding": [
        case(
            "plain",
            ids=i32(3, low=-1, high=9),
            codes=finite_codes(8, 6),
            scales=uniform(8, 2),
            **WIDE,
        ),
    ],
}


def decoded(codes, scales, block, form="e4m3fn"):
    """One value at a time, in float64."""
    values = np.asarray(codes).view(FORMATS[form]).astype(np.float64)
    out = np.empty_like(values)
    for i, j in np.ndindex(*values.shape):
        a, b = (n // size if size else 0 for n, size in zip((i, j), block, strict=True))
        out[i, j] = values[i, j] * np.float64(scales[a, b])
    return out


def weight(f, d, block, form="e4m3fn"):
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.standard_normal((f, d)), jnp.float32)
    q = quantize_fp8(w, block=block, format=form)
    return w, q, decoded(q.codes, q.scales, block, form)


@pytest.mark.parametrize("form", FORMATS)
def test_every_code_decodes_to_its_value(form):
    """e4m3 and e4m3fn differ at exponent 15: 240 against 448, infinity against NaN."""
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(FORMATS[form]).astype(np.float32)
    actual = jax.jit(lambda c: decode_float8(c, form))(codes)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.signbit(actual), np.signbit(expected))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_codes_are_the_nearest_and_saturate(form, dtype):
    """A plain cast to e4m3fn makes NaN of 465 and more."""
    rng = np.random.default_rng(0)
    top = float(ml_dtypes.finfo(FORMATS[form]).max)
    x = rng.standard_normal(5000) * np.exp2(rng.uniform(-20, 8, 5000))
    x = np.concatenate([x, top * np.asarray([1, 1.04, 1.1, -1.1]), [0.0, -0.0]])
    x = x.astype(np.float32).astype(dtype)
    inside = np.clip(x.astype(np.float32), -top, top)
    expected = inside.astype(FORMATS[form]).view(np.uint8)
    encode = jax.jit(lambda x: encode_float8(x, form))
    np.testing.assert_array_equal(encode(x), expected)
    ends = decode_float8(encode(jnp.asarray([jnp.inf, -jnp.inf, jnp.nan])), form)
    np.testing.assert_array_equal(ends, [top, -top, np.nan])
    if form == "e4m3fn":
        assert jnp.isnan(jnp.float32(480).astype(jnp.float8_e4m3fn))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("block", [(0, 0), (1, 0), (4, 4), (1, 4), (4, 8)])
def test_scales_take_the_largest_of_a_block_to_the_largest_code(block, form):
    w, q, values = weight(6, 10, block, form)
    top = float(ml_dtypes.finfo(FORMATS[form]).max)
    amax = np.zeros(q.scales.shape)
    for i, j in np.ndindex(6, 10):
        at = tuple(n // b if b else 0 for n, b in zip((i, j), block, strict=True))
        amax[at] = max(amax[at], abs(float(w[i, j])))
    np.testing.assert_allclose(q.scales, amax / top, rtol=3e-7)
    np.testing.assert_array_equal(dequantize(q), np.float32(values))
    mantissa = 2 if form == "e5m2" else 3
    steps = np.abs(values - w) / np.maximum(np.abs(w), 1e-3)
    assert steps.max() <= 2.0 ** -(mantissa + 1) * 1.001


def test_a_block_of_zeros():
    q = quantize_fp8(jnp.zeros((4, 4)), block=(2, 2))
    np.testing.assert_array_equal(q.scales, np.ones((2, 2)))
    np.testing.assert_array_equal(dequantize(q), np.zeros((4, 4)))


@pytest.mark.parametrize("block", [(0, 0), (1, 0), (4, 4)])
def test_product_and_gradients(block):
    """In the activations and the scales, also where a block hangs over the edge."""
    _, q, values = weight(6, 10, block)
    rng = np.random.default_rng(1)
    x, dy = rng.standard_normal((3, 10)), rng.standard_normal((3, 6))
    with jax.enable_x64(True):
        f = jax.jit(lambda x, s: quantized_matmul(x, FP8Tensor(q.codes, s, block)))
        y, vjp = jax.vjp(f, jnp.asarray(x), jnp.asarray(q.scales, jnp.float64))
        dx, dscales = vjp(jnp.asarray(dy))
    np.testing.assert_allclose(y, x @ values.T, rtol=1e-12)
    np.testing.assert_allclose(dx, dy @ values, rtol=1e-12)
    expected = np.zeros(q.scales.shape)
    dw = dy.T @ x
    unit = decoded(q.codes, np.ones(q.scales.shape), block)
    for i, j in np.ndindex(6, 10):
        at = tuple(n // b if b else 0 for n, b in zip((i, j), block, strict=True))
        expected[at] += dw[i, j] * unit[i, j]
    np.testing.assert_allclose(dscales, expected, rtol=1e-10)


def test_a_scale_for_each_column_of_a_transposed_weight():
    """`execute_dequant_matmul_fp8_f32`: w [k, n] with scale [n], here as [n, k]."""
    rng = np.random.default_rng(0)
    w = rng.integers(0, 0x70, (8, 4)).astype(np.uint8)
    scale, x = np.float32(rng.uniform(1, 2, 4)), np.float32(rng.standard_normal((2, 8)))
    values = w.view(ml_dtypes.float8_e4m3).astype(np.float64) * scale
    q = FP8Tensor(jnp.asarray(w.T), jnp.asarray(scale)[:, None], (1, 0), "e4m3")
    expected = x @ values
    np.testing.assert_allclose(linear(jnp.asarray(x), q), expected, rtol=1e-5)


@pytest.mark.parametrize("block", [(0, 0), (1, 0), (4, 4)])
def test_rows_of_a_table(block):
    _, q, values = weight(6, 10, block)
    y = quantized_embedding(jnp.asarray([5, -1, 0, 6]), q)
    expected = [values[5], 0 * values[0], values[0], 0 * values[0]]
    np.testing.assert_array_equal(y, np.float32(expected))


def test_a_stack_of_experts():
    w = jax.random.normal(jax.random.key(0), (3, 4, 8))
    q = quantize_fp8(w, block=(2, 4))
    values = np.float64(dequantize(q))
    assert q.shape == (3, 4, 8) and q[1].shape == (4, 8) and q.nbytes == 96 + 4 * 12
    np.testing.assert_array_equal(dequantize(q[1]), values[1])
    x = np.float32(np.random.default_rng(1).standard_normal((5, 8)))
    y = grouped_matmul(jnp.asarray(x), q, jnp.asarray([2, 0, 3]))
    expected = np.concatenate([x[:2] @ values[0].T, x[2:] @ values[2].T])
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-6)


def test_refusals():
    _, q, _ = weight(6, 10, (4, 4))
    with pytest.raises(ValueError, match="`format` must be one of e4m3fn, e4m3, e5m2"):
        quantize_fp8(jnp.ones((2, 2)), format="e4m3fnuz")
    with pytest.raises(ValueError, match="`block` must be \\(rows, columns\\)"):
        quantize_fp8(jnp.ones((2, 2)), block=(-1, 2))
    with pytest.raises(TypeError, match="`scales` must have shape \\(2, 3\\)"):
        dequantize(FP8Tensor(q.codes, q.scales[:1], (4, 4)))
    with pytest.raises(TypeError, match="`codes` must be uint8"):
        dequantize(FP8Tensor(q.scales, q.scales))
    with pytest.raises(TypeError, match=r"`x` must be \[..., 10\]"):
        quantized_matmul(jnp.ones((2, 8)), q)
    with pytest.raises(TypeError, match="only the 0 leading dims"):
        q[0]


def test_scales_are_the_documented_quotient():
    """To the bit: XLA multiplies by 1 / 448 where it can, half of the rows differ.

    The comparison with float64 has a tolerance, which the last bit is below.
    """
    w = np.random.default_rng(0).normal(size=(1000, 64)).astype(np.float32)
    expected = np.abs(w).max(1, keepdims=True) / np.float32(448)
    for f in (quantize_fp8, jax.jit(quantize_fp8, static_argnames="block")):
        np.testing.assert_array_equal(f(jnp.asarray(w), block=(1, 0)).scales, expected)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (3, 0, 4)])
@pytest.mark.parametrize("block", [(0, 0), (1, 0), (128, 128)])
def test_an_empty_matrix_is_a_container_that_works(shape, block):
    """Its scales must have the shape that the container asks for, which none read."""
    w = quantize_fp8(jnp.zeros(shape), block=block)
    assert w.shape == shape == dequantize(w).shape
    if len(shape) == 2:
        y = quantized_matmul(jnp.ones((2, shape[1])), w)
        np.testing.assert_array_equal(y, np.zeros((2, shape[0])))
