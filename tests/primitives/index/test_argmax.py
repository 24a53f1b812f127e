"""argmax against a Python loop: ties, signed zeros, NaN policies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.primitives.index.argmax import argmax
from jaxkern.testing.checks import bf16, case, f32

CASES = [
    case("llama3_vocab", x=bf16(4, 128256)),
    case("odd", x=f32(3, 7, 13)),
    case("even", x=f32(8, 16)),
    case("ignore", x=f32(8, 16), nan_policy="ignore"),
    case("row", x=f32(5)),
    case("empty_rows", x=f32(0, 4)),
]
INF, NAN = np.inf, np.nan


def oracle(row, nan_policy):
    best = 0
    for i, value in enumerate(row):
        if nan_policy == "propagate" and np.isnan(value):
            return i
        if (np.isnan(row[best]) and not np.isnan(value)) or value > row[best]:
            best = i
    return best


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("nan_policy", ["propagate", "ignore"])
def test_rows_with_ties_nan_and_infinities(nan_policy, dtype):
    rng = np.random.default_rng(0)
    values = [NAN, -NAN, INF, -INF, 0.0, -0.0, 1.0, 2.0]
    rows = rng.choice(values, (300, 4), p=[0.2, 0.1, 0.1, 0.2, 0.1, 0.1, 0.1, 0.1])
    expected = [oracle(row, nan_policy) for row in rows]
    actual = argmax(jnp.asarray(rows, dtype), nan_policy=nan_policy)
    assert actual.dtype == jnp.int32
    np.testing.assert_array_equal(actual, expected)


def test_propagate_agrees_with_jax():
    x = jnp.asarray([[1.0, NAN, NAN], [3.0, 3.0, 1.0], [-INF, -INF, -INF]])
    np.testing.assert_array_equal(argmax(x), jnp.argmax(x, -1))


def test_axis():
    x = jax.random.normal(jax.random.key(0), (3, 4, 5))
    for axis in (0, 1, 2, -2):
        np.testing.assert_array_equal(argmax(x, axis=axis), jnp.argmax(x, axis))


def test_the_result_has_no_gradient():
    x = jnp.asarray([1.0, 3.0, 2.0])
    index, dot = jax.jvp(argmax, (x,), (jnp.ones(3),))
    assert index == 1 and dot.dtype == jax.dtypes.float0
    grad = jax.grad(lambda x: x[argmax(x)] ** 2)(x)
    np.testing.assert_array_equal(grad, [0, 6, 0])


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="argmax: `nan_policy` must be 'propagate' or"):
        argmax(jnp.ones(3), nan_policy="omit")
    with pytest.raises(ValueError, match="argmax: a row of `x` is empty"):
        argmax(jnp.ones((3, 0)))
