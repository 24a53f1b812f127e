"""l2_norm: formula and gradient, eps inside the root, zero and large vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import l2_norm
from jaxkern.testing.checks import bf16, case, f16, f32

CASES = [
    case("qwen3_next_key", x=bf16(2, 64, 16, 128)),
    case("qwen3_next_decode", x=bf16(1, 1, 32, 128)),
    case("even", x=f32(8, 4, 16)),
    case("odd", x=f32(3, 37, 13), eps=0.5),
    case("one_element", x=f32(5, 1), eps=0.1),
    case("row", x=f16(130)),
    case("empty_rows", x=f32(0, 16)),
    case("empty_dim", x=f32(4, 0)),
]


def formula(x, eps=1e-6, axis=-1):
    return x / np.sqrt((x**2).sum(axis, keepdims=True) + eps)


def gradient(x, dy, eps=1e-6, axis=-1):
    norm = np.sqrt((x**2).sum(axis, keepdims=True) + eps)
    return dy / norm - x * (x * dy).sum(axis, keepdims=True) / norm**3


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("eps", [1e-6, 3.0])
def test_values_and_gradients_match_the_formula(axis, eps):
    x, dy = np.random.default_rng(0).normal(size=(2, 5, 7, 33))
    y, vjp = jax.vjp(lambda x: l2_norm(x, eps=eps, axis=axis), jnp.float32(x))
    np.testing.assert_allclose(y, formula(x, eps, axis), atol=1e-6)
    (dx,) = vjp(jnp.float32(dy))
    np.testing.assert_allclose(dx, gradient(x, dy, eps, axis), atol=3e-6)


def test_eps_is_added_to_the_sum_of_the_squares():
    y = l2_norm(jnp.full((1, 4), 2.0), eps=9.0)  # sqrt(16 + 9)
    np.testing.assert_allclose(y, np.full((1, 4), 0.4), rtol=1e-6)


def test_a_zero_vector_is_zero_with_a_finite_gradient():
    y, vjp = jax.vjp(l2_norm, jnp.zeros((1, 3)))
    np.testing.assert_array_equal(y, np.zeros((1, 3)))
    np.testing.assert_allclose(vjp(jnp.ones((1, 3)))[0], [[1e3] * 3], rtol=1e-6)


def test_large_half_precision_values_do_not_overflow():
    y, vjp = jax.vjp(l2_norm, jnp.full((2, 16), 6e4, jnp.float16))
    np.testing.assert_array_equal(y, np.full((2, 16), 0.25))
    assert np.isfinite(vjp(jnp.ones((2, 16), jnp.float16))[0]).all()


def test_errors_name_the_operand():
    with pytest.raises(TypeError, match="l2_norm: `x` must have a dtype of kind Float"):
        l2_norm(jnp.arange(3))
