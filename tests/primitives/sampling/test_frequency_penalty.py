"""apply_frequency_penalty against its formula in NumPy float64, and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import apply_frequency_penalty
from jaxkern.testing.checks import bf16, case, f32, i32, uniform

CASES = [
    case(
        "plain",
        logits=f32(8, 16),
        counts=i32(8, 16, high=3),
        frequency=uniform(8),
        presence=uniform(8),
    ),
    case(
        "row",
        logits=bf16(7),
        counts=i32(7, high=3),
        frequency=uniform(),
        presence=uniform(low=-1),
    ),
]


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8])
def test_values_and_gradients_match_the_formula(dtype):
    rng = np.random.default_rng(0)
    x, counts = rng.standard_normal((3, 6)), rng.integers(0, 4, (3, 6))
    frequency, dy = rng.standard_normal(3), rng.standard_normal((3, 6))

    def f(x, frequency, presence):
        return apply_frequency_penalty(
            x, jnp.asarray(counts, dtype), frequency=frequency, presence=presence
        )

    with jax.enable_x64(True):
        operands = jnp.asarray(x), jnp.float32(frequency), jnp.float32(0.5)
        y, pull = jax.vjp(f, *operands)
        dx, dfrequency, dpresence = pull(jnp.asarray(dy))
    fall = np.float32(frequency)[:, None] * np.float64(counts) + 0.5 * (counts > 0)
    np.testing.assert_allclose(y, x - fall, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(dx, dy)
    np.testing.assert_allclose(dfrequency, -(dy * counts).sum(1), rtol=1e-5)
    np.testing.assert_allclose(dpresence, -dy[counts > 0].sum(), rtol=1e-5)


def test_infinite_logits_stay():
    x = jnp.asarray([jnp.inf, -jnp.inf, 1.0])
    y = apply_frequency_penalty(x, jnp.asarray([2, 2, 0]), frequency=3.0, presence=1.0)
    np.testing.assert_array_equal(y, x)


def test_errors_say_what_to_do():
    x, counts = jnp.ones((2, 3)), jnp.ones((2, 3), jnp.int32)
    message = r"apply_frequency_penalty: `frequency` of shape \(3,\) must be a scalar"
    with pytest.raises(TypeError, match=message):
        apply_frequency_penalty(x, counts, frequency=jnp.ones(3))
    with pytest.raises(TypeError, match="frequency_penalty: dim `v` is 3 in `logits`"):
        apply_frequency_penalty(x, counts[:, :2])
    with pytest.raises(TypeError, match="`counts` must have a dtype of kind Integer"):
        apply_frequency_penalty(x, x)
