"""Kernels of the Walsh-Hadamard transform on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, fwht, rotate
from jaxkern.primitives.turboquant.fwht import fwht_p
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("k", range(16))
def test_transform(k, dtype):
    rng = np.random.default_rng(k)
    x = jnp.asarray(rng.standard_normal((37, 2**k)), dtype)
    check_against_float64(fwht, x)
    before, after = (jnp.asarray(rng.choice([-1, 1], 2**k), jnp.int8) for _ in range(2))
    check_against_float64(lambda x: fwht_p(x, before, after, scale="orthonormal"), x)


def test_whole_tiles_and_a_transform_that_returns():
    x = jax.random.normal(jax.random.key(0), (64, 8192))
    with backend("triton", strict=True):
        np.testing.assert_allclose(fwht(fwht(x)), x, atol=1e-5)
        impulse = jnp.zeros((32, 128), jnp.bfloat16).at[:, 3].set(1)
        np.testing.assert_array_equal(
            fwht(impulse, scale="none"), fwht(jnp.float32(impulse), scale="none")
        )
        bad = fwht(x.at[5, 77].set(jnp.nan))
    assert jnp.isnan(bad[5]).all() and jnp.isfinite(bad[:5]).all()


def test_rotation_keeps_inner_products():
    q, k = jax.random.normal(jax.random.key(0), (2, 100, 256))
    with backend("triton", strict=True):
        turned = (rotate(q) * rotate(k)).sum(-1)
    np.testing.assert_allclose(turned, (q * k).sum(-1), atol=1e-3)
