"""Matrix products and solves that JAX has already, or that two calls make."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import bias_activation, linear

RNG = np.random.default_rng(0)


def f32(*shape):
    return jnp.float32(RNG.standard_normal(shape))


def test_matmul_broadcasts_leading_dims_and_sums_their_gradient():
    a, b = f32(2, 3, 4), f32(1, 4, 5)
    y, vjp = jax.vjp(jnp.matmul, a, b)
    np.testing.assert_allclose(y, np.float64(a) @ np.float64(b), 1e-5, 1e-5)
    da, db = vjp(y)
    np.testing.assert_allclose(da, np.float64(y) @ np.float64(b[0]).T, 1e-4, 1e-5)
    each = np.float64(a).swapaxes(1, 2) @ np.float64(y)
    np.testing.assert_allclose(db, each.sum(0, keepdims=True), 1e-4, 1e-4)


def test_matmul_in_float64():
    with jax.enable_x64(True):
        a, b = RNG.standard_normal((2, 3, 3))
        y = jnp.matmul(jnp.asarray(a), jnp.asarray(b))
        assert y.dtype == jnp.float64
        np.testing.assert_allclose(y, a @ b, 1e-14)


@pytest.mark.parametrize("x64", [False, True])
def test_solve_batched_with_gradients(x64):
    a = RNG.standard_normal((2, 3, 3)) + 4 * np.eye(3)
    b, dy = RNG.standard_normal((2, 2, 3, 2))
    with jax.enable_x64(x64):
        dtype = jnp.float64 if x64 else jnp.float32
        y, vjp = jax.vjp(jnp.linalg.solve, jnp.asarray(a, dtype), jnp.asarray(b, dtype))
        assert y.dtype == dtype
        da, db = vjp(jnp.asarray(dy, dtype))
    tolerance = 1e-12 if x64 else 1e-4
    x = np.linalg.solve(a, b)
    np.testing.assert_allclose(y, x, tolerance, tolerance)
    expected = np.linalg.solve(a.swapaxes(1, 2), dy)
    np.testing.assert_allclose(db, expected, tolerance, tolerance)
    np.testing.assert_allclose(da, -expected @ x.swapaxes(1, 2), tolerance, tolerance)


def test_product_bias_and_activation():
    x, w, bias = f32(3, 4), f32(5, 4), f32(5)
    y = bias_activation(linear(x, w), bias, activation="silu")
    z = np.float64(x) @ np.float64(w).T + np.float64(bias)
    np.testing.assert_allclose(y, z / (1 + np.exp(-z)), 1e-5, 1e-5)


def test_product_with_a_low_rank_correction():
    x, w, down, up = f32(3, 8), f32(6, 8), f32(2, 8), f32(6, 2)
    y = linear(x, w) + 0.5 * linear(linear(x, down), up)
    merged = np.float64(w) + 0.5 * np.float64(up) @ np.float64(down)
    np.testing.assert_allclose(y, np.float64(x) @ merged.T, 1e-4, 1e-5)
