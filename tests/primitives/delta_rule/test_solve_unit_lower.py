"""solve_unit_lower: NumPy's solution and gradients, what is not read, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import solve_unit_lower
from jaxkern.testing.checks import bf16, case, f32

CASES = [
    case("plain", lower=f32(2, 4, 4, scale=0.5), rhs=f32(2, 4, 3)),
    case("half_precision", lower=bf16(3, 3, scale=0.5), rhs=bf16(3, 2)),
    case("one_row", lower=f32(1, 1), rhs=f32(1, 2)),
    case("no_rows", lower=f32(2, 0, 0), rhs=f32(2, 0, 3)),
    case("large", full=True, lower=f32(2, 64, 64, scale=0.1), rhs=f32(2, 64, 128)),
]


def test_values_and_gradients_match_numpy():
    rng = np.random.default_rng(0)
    lower, rhs, dx = (rng.standard_normal(s) for s in ((2, 5, 5), (2, 5, 3), (2, 5, 3)))
    matrix = np.eye(5) + np.tril(lower, -1)
    with jax.enable_x64(True):
        x, pull = jax.vjp(solve_unit_lower, jnp.asarray(lower), jnp.asarray(rhs))
        dlower, drhs = pull(jnp.asarray(dx))
    expected = np.linalg.solve(matrix, rhs)
    np.testing.assert_allclose(x, expected, rtol=1e-10)
    expected_drhs = np.linalg.solve(matrix.swapaxes(1, 2), dx)
    np.testing.assert_allclose(drhs, expected_drhs, rtol=1e-10)
    expected_dlower = -np.tril(expected_drhs @ expected.swapaxes(1, 2), -1)
    np.testing.assert_allclose(dlower, expected_dlower, rtol=1e-10)


def test_the_diagonal_and_the_upper_part_are_not_read():
    lower = jnp.where(jnp.tril(jnp.ones((4, 4), bool), -1), 0.5, jnp.nan)
    x, pull = jax.vjp(solve_unit_lower, lower, jnp.ones((4, 2)))
    np.testing.assert_allclose(x, 0.5 ** np.arange(4)[:, None] * np.ones(2))
    dlower, drhs = pull(jnp.ones((4, 2)))
    np.testing.assert_array_equal(jnp.triu(dlower), np.zeros((4, 4)))
    assert np.isfinite(drhs).all()


def test_errors_name_the_dims():
    with pytest.raises(TypeError, match="solve_unit_lower: dim `n` is 3 in `lower`"):
        solve_unit_lower(jnp.ones((3, 3)), jnp.ones((4, 2)))
