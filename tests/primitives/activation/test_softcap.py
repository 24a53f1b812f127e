"""Soft cap against its formula in NumPy float64, and its edge cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.primitives.activation.softcap import softcap
from jaxkern.testing.checks import bf16, case, f32

CASES = [
    case("gemma2_logits", x=bf16(2, 256000, scale=20), cap=30.0),
    case("odd", x=f32(3, 7, 13), cap=1.5),
    case("even", x=f32(8, 16, scale=60), cap=50.0),
    case("scalar", x=f32(), cap=2.0),
    case("empty", x=f32(0, 4), cap=2.0),
]


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_values_and_gradients_match_the_formula(cap):
    rng = np.random.default_rng(0)
    x, dy = cap * rng.standard_normal((2, 5, 64))
    y, vjp = jax.vjp(lambda x: softcap(x, cap), jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(y, cap * np.tanh(x / cap), 1e-6, 1e-7 * cap)
    (dx,) = vjp(jnp.asarray(dy, jnp.float32))
    np.testing.assert_allclose(dx, dy / np.cosh(x / cap) ** 2, 1e-5)


def test_saturated_gradient_keeps_its_relative_accuracy():
    x = np.asarray([8.0, -8.0, 12.0])
    dx = jax.grad(lambda x: softcap(x, 1.0).sum())(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(dx, 1 / np.cosh(x) ** 2, 1e-5)


def test_no_cap_is_the_identity():
    x = jnp.asarray([1.0, 1e30])
    np.testing.assert_array_equal(softcap(x, None), x)


def test_special_values():
    x = jnp.asarray([jnp.inf, -jnp.inf, 1e38, jnp.nan])
    y, vjp = jax.vjp(lambda x: softcap(x, 30.0), x)
    np.testing.assert_array_equal(y, [30, -30, 30, np.nan])
    np.testing.assert_array_equal(vjp(jnp.ones(4))[0][:3], [0, 0, 0])


@pytest.mark.parametrize("cap", [0.0, -1.0, float("nan"), float("inf")])
def test_a_cap_must_be_positive_and_finite(cap):
    with pytest.raises(ValueError, match="softcap: `cap` must be positive and finite"):
        softcap(jnp.ones(3), cap)
