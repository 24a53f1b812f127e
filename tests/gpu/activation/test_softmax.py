"""Triton kernels of softmax on a GPU: long and odd rows, masks, a softcap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, softmax
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("d", [1, 13, 1000, 2049, 5000, 16384, 131072])
@pytest.mark.parametrize("masked", [False, True])
def test_softmax_of_long_and_odd_rows(d, dtype, masked):
    rng = np.random.default_rng(d)
    x = jnp.asarray(4 * rng.standard_normal((37, d)), dtype)
    mask = jnp.asarray(rng.random((37, d)) < 0.5).at[3].set(False) if masked else None
    check_against_float64(lambda x: softmax(x, mask, scale=0.7), x)
    bad = x.at[2, d // 2].set(jnp.nan).at[5].set(-jnp.inf)
    with backend("triton", strict=True):
        y = softmax(bad)
    assert jnp.isnan(y[2]).all() and (y[5] == 0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("d", [13, 1000, 5000, 32768, 131071])
@pytest.mark.parametrize("masked", [False, True])
def test_softmax_with_a_softcap(d, dtype, masked):
    rng = np.random.default_rng(d)
    x = jnp.asarray(4 * rng.standard_normal((7, d)), dtype)
    mask = jnp.asarray(rng.random((7, d)) < 0.5).at[3].set(False) if masked else None
    check_against_float64(lambda x: softmax(x, mask, scale=0.7, softcap=3.0), x)
    if mask is None:
        return
    with backend("triton", strict=True):
        y, pull = jax.vjp(lambda x: softmax(x, mask, softcap=3.0), x)
        hidden, pull_hidden = jax.vjp(
            lambda x: softmax(jnp.where(mask, x, jnp.nan), mask, softcap=3.0), x
        )
    np.testing.assert_array_equal(np.float32(hidden), np.float32(y))
    for found, expected in zip(pull_hidden(y), pull(y), strict=True):
        np.testing.assert_array_equal(np.float32(found), np.float32(expected))


@pytest.mark.parametrize("d", [20008, 32768])
@pytest.mark.parametrize("rows", [5, 600])  # fewer and more than there are programs
def test_softmax_of_rows_that_stream_through_shared_memory(rows, d):
    rng = np.random.default_rng(d)
    x = jnp.asarray(4 * rng.standard_normal((rows, d)), jnp.bfloat16)
    check_against_float64(lambda x: softmax(x, scale=-0.7), x)
    bad = x.at[1, d - 1].set(jnp.nan).at[2].set(-jnp.inf).at[3, 7].set(jnp.inf)
    bad = bad.at[4].set(-3e38).at[4, 9].set(-2e38)
    with backend("triton", strict=True):
        y = softmax(bad)
    assert jnp.isnan(y[1]).all() and jnp.isnan(y[3, 7]) and (y[2] == 0).all()
    assert y[4, 9] == 1 and y[4].sum() == 1
