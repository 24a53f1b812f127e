"""Reductions, copies and rearrangements that JAX has already."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxkern import softmax

X = jnp.arange(24.0).reshape(2, 3, 4)


def test_reductions_count_axes_as_numpy_does():
    """In an origin a negative axis of Sum means all axes, of Softmax the end."""
    np.testing.assert_array_equal(jnp.sum(X, axis=-1), np.asarray(X).sum(-1))
    assert jnp.sum(X) == 276 and jnp.sum(X, keepdims=True).shape == (1, 1, 1)
    assert jnp.mean(X) == 11.5
    np.testing.assert_array_equal(jnp.mean(X, axis=1), np.asarray(X).mean(1))
    np.testing.assert_array_equal(softmax(X, axis=-2), softmax(X, axis=1))
    assert softmax(jnp.ones(1)) == 1


@pytest.mark.parametrize("f, dx", [(jnp.sum, 1.0), (jnp.mean, 1 / 24)])
def test_gradients_of_reductions(f, dx):
    np.testing.assert_allclose(jax.grad(f)(X), np.full(X.shape, dx), 1e-6)


def test_softmax_over_channels_of_images():
    x = jnp.float32(np.random.default_rng(0).standard_normal((2, 3, 2, 2)))
    y = softmax(x, axis=1)
    np.testing.assert_allclose(y.sum(1), np.ones((2, 2, 2)), 1e-6)
    e = np.exp(np.float64(x))
    np.testing.assert_allclose(y, e / e.sum(1, keepdims=True), 1e-5)


def test_transposes():
    x = np.asarray(X)
    np.testing.assert_array_equal(jnp.transpose(X[0]), x[0].T)
    np.testing.assert_array_equal(jnp.transpose(X, (1, 0, 2)), x.swapaxes(0, 1))
    np.testing.assert_array_equal(jnp.swapaxes(X, -1, -2), x.swapaxes(1, 2))
    widened = jnp.transpose(X.astype(jnp.bfloat16), (1, 0, 2)).astype(jnp.float32)
    np.testing.assert_array_equal(widened, x.swapaxes(0, 1))


def test_a_strided_copy():
    flat, rows, columns = X.ravel(), 3, 2
    row, column = jnp.arange(rows)[:, None] * 8, jnp.arange(columns) * 3
    expected = [[flat[8 * i + 3 * j] for j in range(columns)] for i in range(rows)]
    np.testing.assert_array_equal(flat[row + column], expected)
    np.testing.assert_array_equal(
        lax.slice(X[0], (0, 1), (3, 4), (2, 2)), X[0, ::2, 1::2]
    )


def test_a_copy_at_an_offset():
    y = lax.dynamic_update_slice(jnp.zeros(6), X.ravel()[5:8], (2,))
    np.testing.assert_array_equal(y, [0, 0, 5, 6, 7, 0])
    copied = jnp.array(X, copy=True)
    np.testing.assert_array_equal(copied, X)
    assert copied is not X


def test_taking_columns_and_writing_them_are_each_others_gradient():
    def take(x):
        return lax.slice_in_dim(x, 1, 3, axis=1)

    def write(part):
        return lax.dynamic_update_slice_in_dim(jnp.zeros((3, 4)), part, 1, axis=1)

    x, part = X[0], X[1, :, :2]
    np.testing.assert_array_equal(take(x), x[:, 1:3])
    np.testing.assert_array_equal(write(part)[:, 1:3], part)
    assert not write(part)[:, [0, 3]].any()
    np.testing.assert_array_equal(jax.vjp(take, x)[1](part)[0], write(part))
    np.testing.assert_array_equal(jax.vjp(write, part)[1](x)[0], take(x))
    kept = lax.dynamic_update_slice_in_dim(x, part, 1, axis=1)
    np.testing.assert_array_equal(kept[:, [0, 3]], x[:, [0, 3]])


def test_features_are_concatenated_exactly():
    parts = [X[0], -X[1, :, :2], X[1, :, 2:] / 3]
    y, vjp = jax.vjp(lambda *p: jnp.concatenate(p, axis=-1), *parts)
    np.testing.assert_array_equal(y, np.concatenate(parts, axis=-1))
    for g, part in zip(vjp(y), parts, strict=True):
        np.testing.assert_array_equal(g, part)


def test_tiled_and_block_repeats_of_heads():
    """Query head i reads key head i % k of tiled heads, i // g of block heads."""
    k, g = 3, 2
    x = jnp.arange(1.0, 7).reshape(1, k, 2)
    tiled = jnp.tile(x, (1, g, 1))
    block = jnp.repeat(x, g, axis=-2)
    for i in range(k * g):
        np.testing.assert_array_equal(tiled[:, i], x[:, i % k])
        np.testing.assert_array_equal(block[:, i], x[:, i // g])
    dy = jnp.arange(12.0).reshape(1, k * g, 2)
    dtiled = jax.vjp(lambda x: jnp.tile(x, (1, g, 1)), x)[1](dy)[0]
    np.testing.assert_array_equal(dtiled, dy[:, :k] + dy[:, k:])
    dblock = jax.vjp(lambda x: jnp.repeat(x, g, axis=-2), x)[1](dy)[0]
    np.testing.assert_array_equal(dblock, dy[:, ::2] + dy[:, 1::2])


def test_repeat_of_an_origin_is_a_tile():
    x = jnp.asarray([1, 2])
    np.testing.assert_array_equal(jnp.tile(x, 2), [1, 2, 1, 2])
    np.testing.assert_array_equal(jnp.repeat(x, 2), [1, 1, 2, 2])


def test_split_reshape_and_fill():
    np.testing.assert_array_equal(jnp.split(X, 2, axis=2)[1], X[..., 2:])
    with pytest.raises(ValueError, match="equal division"):
        jnp.split(X, 3, axis=2)
    np.testing.assert_array_equal(jnp.reshape(X, (4, -1)), np.reshape(X, (4, 6)))
    np.testing.assert_array_equal(jnp.full((2, 3), 7.0), np.full((2, 3), 7.0))
    assert not jnp.zeros((2, 3)).any() and not jnp.zeros_like(X).any()


def test_uniform_numbers_follow_their_key():
    draw = jax.random.uniform(jax.random.key(0), (1000,), minval=-1, maxval=3)
    again = jax.random.uniform(jax.random.key(0), (1000,), minval=-1, maxval=3)
    np.testing.assert_array_equal(draw, again)
    assert -1 <= draw.min() < -0.9 and 2.9 < draw.max() < 3


def test_one_hot_is_zero_out_of_range():
    y = jax.nn.one_hot(jnp.asarray([[2, -1], [3, 0]]), 3)
    np.testing.assert_array_equal(y, [[[0, 0, 1], [0, 0, 0]], [[0, 0, 0], [1, 0, 0]]])
