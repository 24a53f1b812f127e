"""rotate: an orthogonal matrix with the signs of the published tables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import hadamard

from jaxkern import rotate, rotation_signs, unrotate

# the first and last bytes of the two tables, written out: bit 0 first, one is minus
FIRST_A7 = [-1, -1, -1, 1, 1, -1, 1, -1]
LAST_DB = [-1, -1, 1, -1, -1, 1, -1, -1]
LAST_85 = [-1, 1, -1, 1, 1, 1, 1, -1]


def test_signs_are_those_of_the_tables():
    s256, s512 = rotation_signs(256), rotation_signs(512)
    np.testing.assert_array_equal(s512[:256], s256)
    np.testing.assert_array_equal(s256[:8], FIRST_A7)
    np.testing.assert_array_equal(s256[-8:], LAST_DB)
    np.testing.assert_array_equal(s512[-8:], LAST_85)
    assert (s256 == 1).sum() == 124 and (s512 == 1).sum() == 249
    np.testing.assert_array_equal(rotation_signs(64), s512[:64])


def test_seeded_signs_are_the_same_everywhere():
    s = rotation_signs(1024, seed=1)
    assert set(np.unique(s)) == {-1, 1} and s.dtype == np.int8
    np.testing.assert_array_equal(s[:4], rotation_signs(4, seed=1))
    assert (s != rotation_signs(1024, seed=2)).mean() > 0.4
    assert abs(s.mean()) < 0.1


@pytest.mark.parametrize("d", [1, 16, 256])
def test_formula(d):
    x = np.random.default_rng(0).standard_normal((3, d))
    matrix = hadamard(d) @ np.diag(rotation_signs(d)) / np.sqrt(d)
    with jax.enable_x64(True):
        y = rotate(jnp.asarray(x))
        np.testing.assert_allclose(y, x @ matrix.T, atol=1e-13)
        np.testing.assert_allclose(unrotate(y), x, atol=1e-13)


def test_inner_products_stay():
    q, k = jax.random.normal(jax.random.key(0), (2, 5, 64))
    signs = rotation_signs(64, seed=3)
    np.testing.assert_allclose(
        rotate(q, signs) @ rotate(k, signs).T, q @ k.T, atol=1e-5
    )


def test_an_outlier_is_spread_over_all_dims():
    x = jnp.zeros(256).at[7].set(100.0)
    np.testing.assert_allclose(abs(rotate(x)), 100 / 16, rtol=1e-6)


def test_gradient_is_the_inverse():
    x, dy = jax.random.normal(jax.random.key(0), (2, 3, 16))
    (dx,) = jax.vjp(rotate, x)[1](dy)
    np.testing.assert_allclose(dx, unrotate(dy), atol=1e-7)


def test_errors():
    with pytest.raises(ValueError, match=r"table has 512 signs, not 1024. Pass a seed"):
        rotate(jnp.zeros(1024))
    with pytest.raises(TypeError, match=r"dim `d` is 16 in `x` but 8"):
        rotate(jnp.zeros(16), rotation_signs(8))
