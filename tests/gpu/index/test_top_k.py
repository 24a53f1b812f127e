"""Triton kernels of top_k on a GPU: order, ties, NaN, odd rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, top_k
from tests.gpu.index.special_rows import special_rows
from tests.gpu.truth import on_a_gpu

pytestmark = on_a_gpu


def falling_order(row):
    """Indices by falling value, NaN first, the smaller index first on ties."""
    row = np.float64(row)
    value = np.where(np.isnan(row), 0, row)
    return np.lexsort((-value, ~np.isnan(row)))


@pytest.mark.parametrize(
    "v, k, dtype",
    [
        (4096, 1, "float32"),
        (4096, 1000, "bfloat16"),
        (5000, 64, "float16"),
        (50_257, 2, "float32"),
        (128_256, 64, "float32"),
        (128_256, 64, "bfloat16"),
        (128_256, 1024, "float32"),
        (262_144, 1024, "bfloat16"),
        (3, 2, "float32"),
        (128, 8, "bfloat16"),
        (512, 6, "float32"),
        (1000, 16, "float16"),
        (4095, 16, "float32"),
        (262_144, 17, "float32"),
    ],
)
def test_top_k(v, k, dtype):
    x = jnp.asarray(special_rows(v), dtype)
    with backend("triton", strict=True):
        values, indices = jax.jit(top_k, static_argnums=1)(x, k)
    assert values.dtype == x.dtype and indices.dtype == jnp.int32
    expected = np.stack([falling_order(row)[:k] for row in np.asarray(x, np.float64)])
    np.testing.assert_array_equal(indices, expected)
    picked = np.take_along_axis(np.asarray(x), expected, -1)
    bits = {2: np.uint16, 4: np.uint32}[picked.dtype.itemsize]
    np.testing.assert_array_equal(np.asarray(values).view(bits), picked.view(bits))


@pytest.mark.parametrize(
    "v, k, dtype",
    [
        (128, 1, "float16"),
        (160, 3, "bfloat16"),
        (256, 8, "float32"),
        (300, 8, "float32"),
        (512, 6, "float32"),
        (512, 7, "bfloat16"),
    ],
)
def test_many_rows(v, k, dtype):
    """A warp has a row; in the last program some have the last one again."""
    x = np.concatenate([special_rows(v, seed) for seed in range(257)])[:-1]
    with backend("triton", strict=True):
        values, indices = jax.jit(top_k, static_argnums=1)(jnp.asarray(x, dtype), k)
    x = np.asarray(jnp.asarray(x, dtype))
    expected = np.stack([falling_order(row)[:k] for row in x.astype(np.float64)])
    np.testing.assert_array_equal(indices, expected)
    bits = {2: np.uint16, 4: np.uint32}[x.dtype.itemsize]
    picked = np.take_along_axis(x, expected, -1)
    np.testing.assert_array_equal(np.asarray(values).view(bits), picked.view(bits))


def test_top_k_of_many_rows_under_vmap_and_grad():
    x = jax.random.normal(jax.random.key(0), (3, 100, 4097))

    def f(x):
        values, indices = top_k(x, 5)
        return values, indices

    with backend("triton", strict=True):
        values, indices = jax.jit(jax.vmap(f))(x)
        slope = jax.jit(jax.grad(lambda x: top_k(x, 5)[0].sum()))(x)
    expected, places = jax.lax.top_k(x, 5)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(indices, places)
    np.testing.assert_array_equal(slope.sum(-1), 5.0)
    np.testing.assert_array_equal(jnp.take_along_axis(slope, places, -1), 1.0)
