"""Kernels of cumsum on a GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, cumsum
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("n", [1, 7, 64, 1000, 4096, 4097, 20000, 131_073])
@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_running_sums(n, exclusive, reverse, dtype):
    x = jnp.asarray(np.random.default_rng(n).standard_normal((67, n)), dtype)
    check_against_float64(lambda x: cumsum(x, exclusive=exclusive, reverse=reverse), x)


def test_an_infinity_enters_later_sums_only():
    x = jnp.ones((64, 9000)).at[:, 5000].set(jnp.inf)
    with backend("triton", strict=True):
        y = cumsum(x, exclusive=True)
    assert jnp.isfinite(y[:, :5001]).all() and jnp.isinf(y[:, 5001:]).all()
