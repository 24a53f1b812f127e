"""Grouped products in 8 bits on a Hopper GPU, against float64 of the same codes."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkern import backend, dequantize, explain, grouped_matmul_fp8, quantize_fp8
from jaxkern.primitives.moe.grouped_matmul_fp8 import scaled_grouped_matmul_p
from tests.gpu.moe.test_grouped_matmul import random_sizes
from tests.gpu.truth import on_hopper, poison
from tests.primitives.moe.test_grouped_matmul import loop
from tests.primitives.moe.test_grouped_matmul_fp8 import rounded

pytestmark = on_hopper
STEP = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11}  # what rounding can be
NAN = 0x7F  # of e4m3fn


def bound(d: int) -> float:
    """Of the largest result: every 32 columns tensor cores cut a sum to 13 digits."""
    return max(d // 32, 1) * 2.0**-13


def codes(rng, *shape):
    """Of normal numbers, of which the largest are not far from the last code."""
    values = 100 * rng.standard_normal(shape)
    return np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn)


def by_kernel(*operands, dtype):
    with backend("mosaic_gpu", strict=True):
        return scaled_grouped_matmul_p(*operands, preferred_element_type=dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize(
    "r, f, d, sizes",
    [
        (300, 192, 192, [70, 0, 5, 130]),  # a last step of half its columns
        (1, 128, 128, [0, 1]),
        (1024, 512, 256, [128] * 8),
        (800, 1024, 320, [0, 0, 900]),
        (5003, 320, 704, random_sizes(5000, 40)),
        (9, 128, 128, [0] * 5),
        (777, 832, 2880, [1, 700, 0, 3, 60]),
    ],
)
def test_values(dtype, r, f, d, sizes):
    """Odd numbers of rows, empty and unlike groups, what has no group poisoned."""
    rng = np.random.default_rng([r, f, d])
    sizes = np.asarray(sizes)
    x, w = codes(rng, r, d), codes(rng, len(sizes), f, d)
    x_scale = np.float32(2.0 ** rng.integers(-9, -5, r) / d**0.5)
    w_scale = np.float32(rng.uniform(0.002, 0.02, w.shape[:2]))
    exact = [
        a.astype(np.float64) * s[..., None] for a, s in ((x, x_scale), (w, w_scale))
    ]
    expected, _ = loop(*exact, sizes)
    x = x.view(np.uint8)
    behind = slice(min(int(sizes.sum()), r), None)
    x[behind], x_scale[behind] = NAN, np.nan
    w[sizes == 0] = np.nan  # and weights of no rows
    operands = x, x_scale, w.view(np.uint8), w_scale, np.int32(sizes)
    operands = [jnp.asarray(a) for a in operands]
    run = jax.jit(functools.partial(by_kernel, dtype=jnp.dtype(dtype)))
    poison(jnp.zeros(expected.shape, dtype))
    y, again = run(*operands), run(*operands)
    np.testing.assert_array_equal(y, again)
    y = np.asarray(y, np.float64)
    np.testing.assert_array_equal(y[behind], 0)
    largest = np.abs(expected).max()
    allowed = bound(d) * largest + STEP[dtype] * np.abs(expected)
    assert np.isfinite(y).all()
    assert (np.abs(y - expected) <= allowed).all(), np.abs(y - expected).max() / largest


def test_what_is_not_finite_stays_in_its_row_and_its_group():
    rng = np.random.default_rng(0)
    sizes = jnp.asarray([21, 30, 13], jnp.int32)
    x, w = codes(rng, 70, 128), codes(rng, 3, 128, 128)
    x_scale, w_scale = np.ones(70, np.float32), np.ones((3, 128), np.float32)
    x[3], x_scale[22], w[2, 5, 7], w_scale[2, 9] = np.nan, np.inf, np.nan, np.nan
    operands = x.view(np.uint8), x_scale, w.view(np.uint8), w_scale
    f = jax.jit(functools.partial(by_kernel, dtype=jnp.dtype("float32")))
    y = np.asarray(f(*map(jnp.asarray, operands), sizes))
    expected = np.zeros(y.shape, bool)
    expected[3], expected[22], expected[51:64, [5, 9]] = True, True, True
    np.testing.assert_array_equal(~np.isfinite(y), expected)
    np.testing.assert_array_equal(y[64:], 0)


def operands(r=1003, e=12, f=384, d=320):
    rng = np.random.default_rng(1)
    sizes = random_sizes(r - 3, e)
    x, w = rng.standard_normal((r, d)), rng.standard_normal((e, f, d)) / d**0.5
    return *(jnp.asarray(a, jnp.bfloat16) for a in (x, w)), sizes


@pytest.mark.parametrize("block", [(1, 0), (0, 0)])
def test_stored_weights_and_the_gradient_of_x(block):
    x, w, sizes = operands()
    w = quantize_fp8(w, block=block)
    dy = jnp.asarray(np.random.default_rng(2).standard_normal((1003, 384)), x.dtype)

    @jax.jit
    def run(x, w, dy):
        y, pull = jax.vjp(lambda x: grouped_matmul_fp8(x, w, sizes), x)
        return y, *pull(dy)

    assert "mosaic_gpu: pallas.moe.grouped_matmul_fp8" in str(
        explain(grouped_matmul_fp8, x, w, sizes)
    )
    y, dx = run(x, w, dy)
    values = np.float64(dequantize(w))
    expected, groups = loop(rounded(x), values, sizes)
    slopes = np.zeros(x.shape)
    for g, rows in enumerate(groups):
        slopes[rows] = np.float64(dy)[rows] @ values[g]
    for found, e in ((y, expected), (dx, slopes)):
        error = np.abs(np.asarray(found, np.float64) - e).max()
        assert error <= (bound(x.shape[1]) + 2**-8) * np.abs(e).max()


def test_three_products_of_rounded_operands():
    x, w, sizes = operands()
    dy = jnp.asarray(np.random.default_rng(2).standard_normal((1003, 384)), x.dtype)

    @jax.jit
    def run(x, w, dy):
        y, pull = jax.vjp(lambda x, w: grouped_matmul_fp8(x, w, sizes), x, w)
        return y, *pull(dy)

    found = run(x, w, dy)
    x8, w8, dy8 = rounded(x), rounded(w), rounded(dy, "float8_e5m2")
    expected, groups = loop(x8, w8, sizes)
    dx, dw = np.zeros(x8.shape), np.zeros(w8.shape)
    for g, rows in enumerate(groups):
        dx[rows], dw[g] = dy8[rows] @ w8[g], dy8[rows].T @ x8[rows]
    for y, e in zip(found, (expected, dx, dw), strict=True):
        error = np.abs(np.asarray(y, np.float64) - e).max()
        assert error <= (bound(x.shape[1]) + 2**-8) * np.abs(e).max()


def test_under_vmap():
    x, w, _ = operands()
    sizes = jnp.stack([random_sizes(1000, 12, seed) for seed in range(3)])
    many = jnp.stack([x, 2 * x, -x])
    f = jax.jit(jax.vmap(grouped_matmul_fp8, (0, None, 0)))
    together = f(many, w, sizes)
    for y, *one in zip(together, many, sizes, strict=True):
        np.testing.assert_array_equal(y, jax.jit(grouped_matmul_fp8)(one[0], w, one[1]))
