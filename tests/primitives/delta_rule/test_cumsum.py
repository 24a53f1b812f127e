"""cumsum: the four directions and their gradients, any axis, rounding, infinities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import cumsum
from jaxkern.testing.checks import bf16, case, f32

CASES = [
    case("plain", x=f32(2, 3, 7)),
    case("exclusive_from_the_end", x=bf16(3, 5), exclusive=True, reverse=True),
    case("one_element", x=f32(4, 1), exclusive=True),
    case("empty", x=f32(2, 0), exclusive=True, reverse=True),
    case("chunk_decay", full=True, x=f32(1, 64, 32, 64)),
]

DIRECTIONS = [(e, r) for e in (False, True) for r in (False, True)]


def matrix(n, exclusive, reverse):
    """M with y = M x: M_ij = 1 where x_j belongs to the sum y_i."""
    i, j = np.mgrid[:n, :n]
    after, before = (i < j, i > j)
    return ((after if reverse else before) | ((i == j) & (not exclusive))).astype(float)


@pytest.mark.parametrize("exclusive, reverse", DIRECTIONS)
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_values_and_gradients_are_those_of_the_triangular_matrix(
    axis, exclusive, reverse
):
    x, dy = np.random.default_rng(0).standard_normal((2, 3, 5, 4))

    def apply(m, x):
        return np.moveaxis(np.moveaxis(x, axis, -1) @ m.T, -1, axis)

    m = matrix(x.shape[axis], exclusive, reverse)
    y, pull = jax.vjp(
        lambda x: cumsum(x, axis=axis, exclusive=exclusive, reverse=reverse),
        jnp.float32(x),
    )
    np.testing.assert_allclose(y, apply(m, x), atol=1e-6)
    np.testing.assert_allclose(pull(jnp.float32(dy))[0], apply(m.T, dy), atol=1e-6)


def test_half_precision_sums_are_rounded_once():
    x = jnp.asarray(np.random.default_rng(0).uniform(size=1000), jnp.bfloat16)
    exact = np.cumsum(np.asarray(x, np.float64))
    np.testing.assert_allclose(np.asarray(cumsum(x), np.float64), exact, rtol=2**-8)


def test_an_exclusive_sum_is_finite_before_and_at_an_infinity():
    x = jnp.array([1.0, -jnp.inf, 2.0])
    np.testing.assert_array_equal(cumsum(x, exclusive=True), [0, 1, -jnp.inf])


def test_errors_name_the_operand():
    with pytest.raises(TypeError, match="cumsum: `x` must have a dtype of kind Float"):
        cumsum(jnp.arange(3))
