"""Triton kernels of argsort on a GPU: order, ties, NaN, odd rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import argsort, backend, explain
from tests.gpu.index.special_rows import special_rows
from tests.gpu.truth import on_a_gpu

pytestmark = on_a_gpu


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
