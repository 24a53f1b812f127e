"""Triton kernels of argmax, argsort and top_k on a GPU: order, ties, NaN, odd rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import argmax, argsort, backend, explain, top_k
from tests.gpu.truth import on_a_gpu

pytestmark = on_a_gpu
INF, NAN = np.inf, np.nan


def special_rows(v, seed=0):
    """Random, few values, all equal, NaN of both signs, infinities, signed zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((8, v)).astype(np.float32)
    x[1] = np.round(x[1])
    x[2] = 2.5
    x[3, ::7] = NAN
    x[3, 1::7] = -NAN
    x[4, rng.integers(0, v, 5)] = INF
    x[5] = -INF
    x[5, v // 2] = 0.0
    x[5, v // 3] = -0.0
    x[6] = NAN
    x[6, -1] = -INF
    x[7] = np.sort(x[7])
    return x


def falling_order(row):
    """Indices by falling value, NaN first, the smaller index first on ties."""
    row = np.float64(row)
    value = np.where(np.isnan(row), 0, row)
    return np.lexsort((-value, ~np.isnan(row)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("v", [1, 2, 31, 128, 1000, 4096, 4097, 128_256])
def test_argmax(v, dtype):
    x = jnp.asarray(special_rows(v), dtype)
    with backend("triton", strict=True):
        largest = jax.jit(argmax)(x)
        ignoring = jax.jit(lambda x: argmax(x, nan_policy="ignore"))(x)
    rows = np.asarray(x, np.float64)
    np.testing.assert_array_equal(largest, np.argmax(rows, -1))
    # NaN lies below -inf: it wins where nothing else is
    best = np.nanmax(np.where(np.isnan(rows), -INF, rows), -1, keepdims=True)
    hit = rows == best
    np.testing.assert_array_equal(ignoring, np.where(hit.any(-1), hit.argmax(-1), 0))


def test_argmax_of_many_rows_and_of_none():
    x = jax.random.normal(jax.random.key(0), (5003, 77))
    with backend("triton", strict=True):
        np.testing.assert_array_equal(argmax(x), jnp.argmax(x, -1))
        assert argmax(x[:0]).shape == (0,)
        np.testing.assert_array_equal(argmax(x, axis=0), jnp.argmax(x, 0))


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


def stable_order(x, descending=False, nan_policy="propagate"):
    """NaN last, or first where it is the largest and comes first."""
    x = np.asarray(x, np.float64)
    nan = np.isnan(x)
    first = descending and nan_policy == "propagate"
    value = np.where(nan, 0, -x if descending else x)
    return np.stack([np.lexsort(row) for row in np.stack([value, nan ^ first], 1)])


def check_argsort(x, **options):
    with backend("triton", strict=True):
        found = jax.jit(functools.partial(argsort, **options))(x)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, stable_order(x, **options))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("nan_policy", ["propagate", "ignore"])
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("v", [1000, 20_011])
def test_argsort(v, descending, nan_policy, dtype):
    x = jnp.asarray(special_rows(v), dtype)
    check_argsort(x, descending=descending, nan_policy=nan_policy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "v", [1, 2, 33, 1023, 1024, 4096, 4097, 8192, 8193, 128_256, 1_000_003]
)
def test_argsort_of_any_length(v, dtype):
    check_argsort(jnp.asarray(special_rows(v), dtype))


@pytest.mark.parametrize("v", [4096, 100_003])
def test_argsort_of_rows_in_order_or_of_few_values(v):
    number = jnp.arange(v, dtype=jnp.float32)
    x = jnp.stack([number, -number, number % 2, number // (v // 3), 0 * number])
    check_argsort(x)


def test_argsort_of_many_long_rows():
    x = jnp.round(jax.random.normal(jax.random.key(0), (200, 16_000)), 2)
    check_argsort(x)
    check_argsort(x[:, :13_001].astype(jnp.bfloat16), descending=True)


def test_argsort_of_one_long_row():
    check_argsort(jax.random.normal(jax.random.key(0), (1, 2**22)))


@pytest.mark.parametrize("v", [300, 9000])
def test_argsort_of_many_rows_along_an_axis_under_vmap_and_of_none(v):
    x = jax.random.normal(jax.random.key(0), (3, v, 37))
    with backend("triton", strict=True):
        found = jax.jit(jax.vmap(functools.partial(argsort, axis=0)))(x)
        assert argsort(x[:0]).shape == (0, v, 37)
        assert argsort(x[:, :0], axis=1).shape == (3, 0, 37)
    np.testing.assert_array_equal(found, np.argsort(x, 1, kind="stable"))


def test_argsort_of_64_and_8_bits_is_refused_in_words():
    x = jax.ShapeDtypeStruct((2, 9000), jnp.float64)
    with jax.enable_x64(True):
        assert "`x` is float64" in str(explain(argsort, x))
    x = jax.ShapeDtypeStruct((2, 9000), jnp.float8_e4m3fn)
    assert "`x` is float8_e4m3fn" in str(explain(argsort, x))
