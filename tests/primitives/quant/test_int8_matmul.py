"""int8_matmul: exact integer sums, straight-through gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import int8_matmul, quantize_int, quantized_matmul
from jaxkern.testing.checks import case, uniform
from tests.primitives.quant.test_int_matmul import int8

CASES = [
    case(
        "plain",
        x_codes=int8(4, 2, 16),
        x_scales=uniform(4, 2, 1),
        codes=int8(8, 16),
        scales=uniform(8, 1),
    ),
    case(
        "vector",
        x_codes=int8(3),
        x_scales=uniform(1),
        codes=int8(1, 3),
        scales=uniform(1, 1),
    ),
]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 3, 64)).astype(np.float32)
W = quantize_int(jnp.asarray(RNG.normal(size=(8, 64)), jnp.float32))


def test_formula():
    scale = np.abs(X).max(-1, keepdims=True) / 127
    codes = np.rint(X / scale).astype(np.int64)
    total = codes @ np.asarray(W.codes, np.int64).T
    expected = total * scale * np.asarray(W.scales)[:, 0]
    np.testing.assert_allclose(int8_matmul(X, W), expected, rtol=1e-5)
    exact = X @ (np.asarray(W.codes) * np.asarray(W.scales)).T
    error = np.abs(np.asarray(int8_matmul(X, W)) - exact).max()
    assert 1e-4 < error < 0.02 * np.abs(exact).max()


def test_sums_do_not_overflow_or_round():
    x = jnp.full((1, 20000), 1.0).at[0, 0].set(-1.0)
    w = quantize_int(jnp.full((1, 20000), 1.0))
    np.testing.assert_allclose(int8_matmul(x, w), [[19998.0]], rtol=1e-7)


@pytest.mark.parametrize("first", [jax.jacrev, jax.jacfwd])
@pytest.mark.parametrize("second", [jax.jacrev, jax.jacfwd])
def test_the_mixed_second_derivative_is_symmetric(first, second):
    """By x and scales, in every mode.

    The generic checks differentiate a primitive, and this rounding is around one.
    """
    dy = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 8)), jnp.float32)

    def loss(x, scales):
        return jnp.sum(int8_matmul(x, dataclasses.replace(W, scales=scales)) * dy)

    mixed = jax.jit(second(first(loss, (0, 1)), (0, 1)))
    hessian = mixed(jnp.asarray(X), W.scales)
    by_scales = hessian[0][1].reshape(-1, 8)
    np.testing.assert_allclose(by_scales, hessian[1][0].reshape(8, -1).T, atol=1e-4)
    expected = np.einsum("btf,fd->btdf", dy, np.asarray(W.codes, np.float64))
    np.testing.assert_allclose(by_scales, expected.reshape(-1, 8), rtol=1e-5)


def test_the_gradient_is_straight_through():
    dy = np.random.default_rng(1).normal(size=(2, 3, 8)).astype(np.float32)
    values = np.asarray(W.codes, np.float64) * np.asarray(W.scales)
    dx, dw = jax.vjp(int8_matmul, jnp.asarray(X), W)[1](jnp.asarray(dy))
    np.testing.assert_allclose(dx, dy @ values, rtol=1e-4, atol=1e-5)
    unscaled = np.asarray(int8_matmul(X, W)) / np.asarray(W.scales)[:, 0]
    expected = (unscaled * dy).sum((0, 1))[:, None]
    np.testing.assert_allclose(dw.scales, expected, rtol=1e-4, atol=1e-2)
    dot = jax.jvp(lambda x: int8_matmul(x, W), (X,), (X,))[1]
    np.testing.assert_allclose(dot, X @ values.T, rtol=1e-4, atol=1e-5)


def test_bfloat16_and_vmap():
    x = jnp.asarray(X, jnp.bfloat16)
    y = jax.vmap(int8_matmul, (0, None))(x, W)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, int8_matmul(x, W))


@pytest.mark.full
def test_one_scale_for_all_of_x_and_scales_of_columns():
    columns = np.linspace(0.5, 2, 64, dtype=np.float32)
    scaled = X * columns
    scale = np.abs(scaled).max() / 127
    codes = np.rint(scaled / scale).astype(np.int64)
    total = codes @ np.asarray(W.codes, np.int64).T
    expected = total * scale * np.asarray(W.scales)[:, 0]

    def f(x, columns):
        return int8_matmul(x, W, columns, x_scale="tensor")

    y, pull = jax.vjp(f, jnp.asarray(X), jnp.asarray(columns))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    dx, dcolumns = pull(jnp.ones_like(y))
    values = (np.asarray(W.codes, np.float64) * np.asarray(W.scales)).sum(0)
    expected = np.broadcast_to(values * columns, X.shape)
    np.testing.assert_allclose(dx, expected, rtol=1e-4, atol=1e-5)
    expected = values * X.sum((0, 1))
    np.testing.assert_allclose(dcolumns, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("x_scale", ["row", "tensor"])
def test_no_rows(x_scale):
    assert int8_matmul(X[:0], W, x_scale=x_scale).shape == (0, 3, 8)
    assert quantized_matmul(X[:0], W, compute_dtype=jnp.int8).shape == (0, 3, 8)


def test_refusals():
    with pytest.raises(ValueError, match="`x_scale` must be 'row' or 'tensor'"):
        int8_matmul(X, W, x_scale="column")
    with pytest.raises(TypeError, match=r"`column_scales` must have shape \(64,\)"):
        int8_matmul(X, W, jnp.ones(3))
    with pytest.raises(TypeError, match=r"one scale a row, got IntTensor\(int8 / 32"):
        int8_matmul(X, quantize_int(jnp.ones((8, 64)), group_size=32))
    with pytest.raises(TypeError, match="int8_matmul: dim `d`"):
        int8_matmul(X[..., :8], W)
