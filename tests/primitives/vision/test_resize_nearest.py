"""resize_nearest against PyTorch and JAX; JAX's antialiased resize is the origin's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import resize_nearest
from tests.golden.torch_losses_vision import assert_equals_torch

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)), jnp.float32)


def test_equals_torch_and_jax():
    assert_equals_torch("resize_nearest", resize_nearest)
    expected = jax.image.resize(X, (2, 9, 8), "nearest")
    np.testing.assert_array_equal(resize_nearest(X, (3, 2)), expected)


def test_the_gradient_is_the_sum_of_each_block():
    dy = np.random.default_rng(1).normal(size=(2, 6, 8))
    (dx,) = jax.vjp(resize_nearest, X)[1](jnp.asarray(dy, jnp.float32))
    expected = dy.reshape(2, 3, 2, 4, 2).sum((2, 4))
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-6)


def test_nhwc_and_integers():
    x = np.arange(24).reshape(2, 3, 4)
    y = resize_nearest(np.moveaxis(x, 0, -1), 2, layout="NHWC")
    np.testing.assert_array_equal(jnp.moveaxis(y, -1, 0), resize_nearest(x))


def test_a_scale_that_is_not_whole_is_refused():
    with pytest.raises(ValueError, match=r"`scale` must be one or two integers"):
        resize_nearest(X, 1.5)


@pytest.mark.parametrize(
    "name, size", {"resize_down": (4, 5), "resize_up": (7, 11)}.items()
)
def test_jax_resizes_as_bilinear_resize_2d(name, size):
    """Antialiased triangle filter, half-pixel centres, weights renormalised."""

    def resize(x):
        return jax.image.resize(x, (*x.shape[:2], *size), "linear", antialias=True)

    assert_equals_torch(name, resize)


def triangle(n, m):
    """The origin's weights `[m, n]` from n to m pixels."""
    scale = m / n
    support = max(1.0, 1 / scale)
    centres = (np.arange(m) + 0.5) / scale - 0.5
    weights = 1 - abs(np.arange(n) - centres[:, None]) / support
    weights = np.maximum(weights, 0)
    return weights / weights.sum(1, keepdims=True)


@pytest.mark.parametrize("size", [(3, 5), (12, 7)])
def test_the_formula_of_bilinear_resize_2d(size):
    x = np.random.default_rng(2).normal(size=(6, 6, 2))
    expected = np.einsum(
        "ah,bw,hwc->abc", triangle(6, size[0]), triangle(6, size[1]), x
    )
    y = jax.image.resize(jnp.asarray(x, jnp.float32), (*size, 2), "linear")
    np.testing.assert_allclose(y, expected, atol=1e-5)
