"""Operands of the tests of norms on a GPU, and the checks that several norms share."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern import add_rms_norm, backend
from tests.gpu.truth import as_tuple, check_against_float64

DTYPES = ["bfloat16", "float16", "float32"]
ODD = [1, 13, 128, 1000, 1025, 4096, 5000, 8193, 16384, 40001, 131071, 131072]
WIDTHS = [1, 13, 128, 1000, 1025, 2816, 4096]
LONG = [8193, 10007, 12288, 16384, 131072]
STREAMED = [(137, 16384), (37, 40001)]  # n, d


def check_long_and_odd_rows(f, d, dtype):
    rng = np.random.default_rng(d)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    rows = 300 if d < 5000 else 37 if d < 100_000 else 5
    operands = [draw(rows, d)] + [draw(rows, d)] * (f is add_rms_norm)
    slack = 1e3 if d == 1 else 1.0  # there layer_norm's rstd is 1 / sqrt(eps)
    check_against_float64(f, *operands, draw(d), draw(d), slack=slack)
    check_against_float64(f, *operands, slack=slack)


def draws(dtype, seed=0):
    rng = np.random.default_rng(seed)
    return lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)


def terms_of(d, norms=1):
    """The size of what cancels in a gradient: all of it in a row of one element.

    There it is rstd dy, and the mean of 1 / (x^2 + eps) is sqrt(pi / 2 / eps). Through
    two norms in a row it is rstd_1 rstd_2 dy.
    """
    return (math.pi / 2 / 1e-6) ** (0.25 * norms) if d == 1 else 1e-2


def rows_of(d):
    """More than the programs of a backward pass."""
    return 300 if d < 2000 else 137 if d < 20000 else 5


def check_bad_rows(f):
    draw = draws("float32")
    x, other, weight = draw(6, 1030), draw(6, 1030), draw(1030)
    good = [0, 2, 3, 5]
    for bad in (jnp.nan, jnp.inf):
        with backend("triton", strict=True):
            y = jax.jit(f)(x.at[1, 7].set(bad).at[4, 1029].set(bad), other, weight)
        with backend("xla"):
            expected = f(x, other, weight)
        for row in good:
            np.testing.assert_allclose(y[row], expected[row], rtol=1e-4, atol=1e-5)
        assert jnp.isnan(y[jnp.asarray([1, 4])]).any(-1).all()


def check_same_gradients(f, *operands):
    """In every run, to the last bit."""

    def loss(*operands):
        return sum(y.astype(jnp.float32).sum() for y in as_tuple(f(*operands)))

    with backend("triton", strict=True):
        slope = jax.jit(jax.grad(loss, argnums=range(len(operands))))
        first, second = slope(*operands), slope(*operands)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
