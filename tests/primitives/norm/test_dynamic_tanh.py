"""dynamic_tanh: the formula and its gradients in NumPy float64, its tails, dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import dynamic_tanh
from jaxkern.testing.checks import bf16, case, f16, f32, uniform

CASES = [
    case("plain", x=f32(8, 4, 16), alpha=uniform(), weight=f32(16), bias=f32(16)),
    case("no_weight", x=f32(3, 7, 13), alpha=uniform(), bias=f32(13)),
    case("bare", x=f16(130), alpha=uniform()),
    case("empty_rows", x=f32(0, 16), alpha=uniform(), weight=f32(16)),
    case(
        "vit_l_16",
        full=True,
        x=bf16(8, 197, 1024),
        alpha=uniform(),
        weight=bf16(1024),
        bias=bf16(1024),
    ),
]


def test_values_and_gradients_match_the_formula():
    rng = np.random.default_rng(0)
    x, dy = 2 * rng.standard_normal((2, 5, 33))
    weight, bias, alpha = *rng.standard_normal((2, 33)), 0.7
    operands = map(jnp.float32, (x, alpha, weight, bias))
    y, pull = jax.vjp(dynamic_tanh, *operands)
    t = np.tanh(alpha * x)
    np.testing.assert_allclose(y, t * weight + bias, atol=1e-6)
    slope = dy * weight * (1 - t**2)
    expected = alpha * slope, (slope * x).sum(), (dy * t).sum(0), dy.sum(0)
    for found, e in zip(pull(jnp.float32(dy)), expected, strict=True):
        np.testing.assert_allclose(found, e, rtol=1e-5, atol=1e-5)


def test_the_slope_of_large_values_keeps_its_digits():
    """tanh(12) is 1 in float32, and 1 - 1 = 0; the slope there is 1.5e-10."""
    slope = jax.grad(lambda x: dynamic_tanh(x, 2.0).sum())(jnp.float32([6.0]))
    np.testing.assert_allclose(slope, 2 / np.cosh(12.0) ** 2, rtol=1e-5)


@pytest.mark.parametrize("alpha", [1, 1.0, np.float64(1), jnp.bfloat16(1)])
def test_alpha_may_be_a_number(alpha):
    x = jnp.linspace(-2, 2, 6).astype(jnp.bfloat16)
    y = dynamic_tanh(x, alpha)
    assert y.dtype == jnp.bfloat16
    exact = np.tanh(np.float64(x))
    np.testing.assert_array_equal(y, jnp.asarray(exact, jnp.bfloat16))


def test_errors_name_the_operand():
    x = jnp.ones((2, 4))
    with pytest.raises(TypeError, match="dynamic_tanh: dim `d` is 4 in `x` but 3 in"):
        dynamic_tanh(x, 1.0, jnp.ones(3))
    with pytest.raises(TypeError, match=r"dynamic_tanh: `alpha` must have dims \[\]"):
        dynamic_tanh(x, jnp.ones(4))
