"""GELU against PyTorch's values in float64, and its edge cases."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import gelu
from jaxkern.testing.checks import bf16, case, f32

CASES = [
    case("plain", x=f32(8, 2, 4)),
    case("odd", x=bf16(3, 7), approximate="none"),
    case("scalar", x=f32()),
    case("empty", x=f32(0, 4)),
    case("gemma2_9b_decode", x=bf16(4, 14336), full=True),
]
TORCH = np.load(Path(__file__).parents[2] / "golden" / "torch_activations.npz")


@pytest.mark.parametrize("approximate, name", [("tanh", "gelu_tanh"), ("none", "gelu")])
def test_values_and_derivatives_are_pytorchs(approximate, name):
    z = jnp.asarray(TORCH["z"])
    y, vjp = jax.vjp(lambda z: gelu(z, approximate=approximate), z)
    np.testing.assert_allclose(y, TORCH[name], 1e-5, 1e-8)
    slope = TORCH[f"{name}_slope"]
    np.testing.assert_allclose(vjp(jnp.ones_like(z))[0], slope, 1e-5, 1e-7)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_far_negative_values_keep_their_relative_accuracy(approximate):
    z = np.asarray([-4.0, -4.75])
    if approximate == "tanh":
        u = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
        expected = z / (1 + np.exp(-2 * u))
    else:
        expected = z * np.vectorize(math.erfc)(-z / math.sqrt(2)) / 2
    y = gelu(jnp.asarray(z, jnp.float32), approximate=approximate)
    np.testing.assert_allclose(y, expected, 1e-5)


def test_special_values():
    x = jnp.asarray([jnp.inf, -jnp.inf, jnp.nan, 1e38, -1e38])
    for approximate in ("tanh", "none"):
        y, vjp = jax.vjp(lambda x, a=approximate: gelu(x, approximate=a), x)
        np.testing.assert_array_equal(y, [np.inf, np.nan, np.nan, x[3], 0])
        np.testing.assert_array_equal(vjp(jnp.ones(5))[0][3:], [1, 0])


def test_an_unknown_approximation_is_refused():
    with pytest.raises(ValueError, match="gelu: `approximate` must be 'tanh' or"):
        gelu(jnp.ones(2), approximate="exact")
