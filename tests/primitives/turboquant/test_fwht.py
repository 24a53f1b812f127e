"""fwht: the matrix of scipy.linalg.hadamard, signs on either side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import hadamard

from jaxkern import fwht
from jaxkern.primitives.turboquant.fwht import fwht_p
from jaxkern.testing.checks import Spec, bf16, case, f32


def signs(d):
    return Spec((d,), np.int8, lambda rng, s: 2 * rng.integers(0, 2, s) - 1)


CASES = [
    case("plain", x=f32(8, 16), signs_before=signs(16), signs_after=signs(16)),
    case("two_factors", x=bf16(2, 3, 64), scale="none"),
    case("no_rows", x=f32(0, 4)),
    case("gemma4_rotation", full=True, x=f32(64, 8, 512), signs_before=signs(512)),
]


@pytest.mark.parametrize("d", [2**k for k in range(13)])
def test_formula(d):
    """Sizes of one, two and three factors."""
    x = np.random.default_rng(d).standard_normal((2, d))
    matrix = hadamard(d)
    with jax.enable_x64(True):
        y = fwht(jnp.asarray(x), scale="none")
        np.testing.assert_allclose(y, x @ matrix, rtol=1e-12, atol=1e-11)
        y = fwht(jnp.asarray(x))
        np.testing.assert_allclose(y, x @ matrix / np.sqrt(d), rtol=1e-12, atol=1e-12)


def test_signs_multiply_before_and_after():
    x, before = jnp.arange(4.0), jnp.array([1, -1, 1, 1])
    after = jnp.array([1, 1, -1, 1], jnp.int8)
    y = fwht_p(x, before, after, scale="none")
    np.testing.assert_array_equal(y, after * (hadamard(4) @ (before * x)))


def test_orthonormal_is_its_own_inverse_and_transpose():
    x = jax.random.normal(jax.random.key(0), (3, 64))
    np.testing.assert_allclose(fwht(fwht(x)), x, atol=1e-6)
    dy = jax.random.normal(jax.random.key(1), x.shape)
    (dx,) = jax.vjp(fwht, x)[1](dy)
    np.testing.assert_array_equal(dx, fwht(dy))


def test_float32_is_not_rounded_to_a_lower_precision():
    """Sums of 512 ones and minus ones are exact."""
    x = jnp.asarray(np.random.default_rng(0).integers(-1000, 1000, (4, 512)))
    y = fwht(x.astype(jnp.float32), scale="none")
    np.testing.assert_array_equal(y, np.asarray(x) @ hadamard(512))


def test_axis():
    x = jax.random.normal(jax.random.key(0), (4, 8, 3))
    y = fwht(x, axis=1)
    np.testing.assert_array_equal(y[:, :, 2], fwht(x[:, :, 2]))


def test_a_transform_of_any_size_is_two_products_at_most_up_to_1024():
    text = str(
        jax.make_jaxpr(lambda x: fwht_p.reference(x, None, None, scale="none"))(
            jnp.zeros((2, 1024))
        )
    )
    assert text.count("dot_general") == 2


def test_errors():
    with pytest.raises(TypeError, match=r"fwht: .* power of two, got shape \(2, 12\)"):
        fwht(jnp.zeros((2, 12)))
    with pytest.raises(ValueError, match=r"fwht: `scale` must be .* got 'ortho'"):
        fwht(jnp.zeros(4), scale="ortho")
