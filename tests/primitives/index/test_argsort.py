"""argsort against Python's stable sort: ties, signed zeros, NaN, infinities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import argsort, top_k
from jaxkern.testing.checks import bf16, case, f32

CASES = [
    case("plain", x=f32(8, 6)),
    case("odd", x=bf16(3, 2, 5), descending=True, nan_policy="ignore"),
    case("empty_rows", x=f32(0, 4)),
]
INF, NAN = np.inf, np.nan


def oracle(row, descending, nan_policy):
    def rank(i):
        last = np.isnan(row[i]) != (descending and nan_policy == "propagate")
        return last, 0 if np.isnan(row[i]) else (-row[i] if descending else row[i])

    return sorted(range(len(row)), key=rank)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("nan_policy", ["propagate", "ignore"])
@pytest.mark.parametrize("descending", [False, True])
def test_rows_with_ties_nan_and_infinities(descending, nan_policy, dtype):
    rng = np.random.default_rng(0)
    rows = rng.choice([NAN, -NAN, INF, -INF, 0.0, -0.0, 1.0, 2.0], (100, 7))
    indices = argsort(
        jnp.asarray(rows, dtype), descending=descending, nan_policy=nan_policy
    )
    expected = [oracle(row, descending, nan_policy) for row in rows]
    np.testing.assert_array_equal(indices, expected)
    assert indices.dtype == jnp.int32


def test_ties_keep_the_smaller_index_first_when_descending():
    """A reversed ascending order would put the larger index first."""
    x = jnp.asarray([1.0, 3.0, 1.0, 3.0])
    np.testing.assert_array_equal(argsort(x, descending=True), [1, 3, 0, 2])


def test_minus_infinity_has_an_index_of_its_own_in_rows_of_any_length():
    """Padding to a power of two must not come before an element of -inf."""
    x = jnp.asarray([-INF, 2.0, -INF])
    np.testing.assert_array_equal(argsort(x, descending=True), [1, 0, 2])


def test_propagate_agrees_with_jax_and_top_k():
    x = jnp.asarray([[1.0, NAN, 3.0, NAN, -INF], [2.0, 2.0, -0.0, 0.0, INF]])
    np.testing.assert_array_equal(argsort(x), jnp.argsort(x, stable=True))
    falling = argsort(x, descending=True)
    np.testing.assert_array_equal(falling, top_k(x, 5)[1])


def test_axis():
    x = jax.random.normal(jax.random.key(0), (3, 4, 5))
    np.testing.assert_array_equal(argsort(x, axis=1), np.argsort(x, 1))


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="argsort: `nan_policy` must be 'propagate'"):
        argsort(jnp.ones(3), nan_policy="omit")
