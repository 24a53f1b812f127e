"""Triton kernels of argmax on a GPU: ties, NaN, odd rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import argmax, backend
from tests.gpu.index.special_rows import INF, special_rows
from tests.gpu.truth import on_a_gpu

pytestmark = on_a_gpu


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
