"""unit_lower_inverse: NumPy's inverse and gradient, what is not read, stability."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import unit_lower_inverse
from jaxkern.testing.checks import bf16, case, f32

CASES = [
    case("plain", a=f32(2, 5, 5, scale=0.5)),
    case("half_precision", a=bf16(3, 4, 4, scale=0.5)),
    case("one_row", a=f32(3, 1, 1)),
    case("no_rows", a=f32(2, 0, 0)),
    case("chunk_of_64", full=True, a=f32(1, 4, 8, 64, 64, scale=0.1)),
]


@pytest.mark.parametrize("c", [1, 2, 3, 7, 8, 64])
def test_values_and_gradients_match_numpy(c):
    with jax.enable_x64(True):
        a, dx = np.random.default_rng(c).standard_normal((2, 3, c, c)) / 4
        expected = np.linalg.inv(np.eye(c) + np.tril(a, -1))
        x, pull = jax.vjp(unit_lower_inverse, jnp.asarray(a))
        np.testing.assert_allclose(x, expected, rtol=1e-9, atol=1e-9)
        xt = expected.swapaxes(1, 2)
        da = -np.tril(xt @ dx @ xt, -1)
        np.testing.assert_allclose(pull(jnp.asarray(dx))[0], da, rtol=1e-9, atol=1e-9)


def test_the_diagonal_and_the_upper_part_are_not_read():
    a = jnp.where(jnp.tril(jnp.ones((4, 4), bool), -1), 0.5, jnp.nan)
    x, pull = jax.vjp(unit_lower_inverse, a)
    expected = unit_lower_inverse(jnp.tril(jnp.full((4, 4), 0.5), -1))
    np.testing.assert_array_equal(x, expected)
    (da,) = pull(jnp.ones((4, 4)))
    np.testing.assert_array_equal(jnp.triu(da), np.zeros((4, 4)))


def test_equal_keys_do_not_blow_up():
    # A = all ones, the worst keys of a delta rule: X is bidiagonal, while the powers of
    # A reach 10**17, which a series would have to cancel in float32
    x = unit_lower_inverse(jnp.ones((64, 64)))
    np.testing.assert_allclose(x, np.eye(64) - np.eye(64, k=-1), atol=1e-6)


def test_errors_name_the_dims():
    with pytest.raises(TypeError, match="unit_lower_inverse: dim `c` is"):
        unit_lower_inverse(jnp.ones((3, 4)))
