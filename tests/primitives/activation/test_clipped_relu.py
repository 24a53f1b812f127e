"""Clipped ReLU against PyTorch's hardtanh in float64, and its corners."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import clipped_relu
from jaxkern.testing.checks import bf16, case, f32

CASES = [
    case("plain", x=f32(8, 2, 4, scale=5)),
    case("odd", x=bf16(3, 7), ceiling=0.5),
    case("scalar", x=f32()),
    case("empty", x=f32(0, 4)),
]
TORCH = np.load(Path(__file__).parents[2] / "golden" / "torch_activations.npz")


def test_values_and_derivatives_are_pytorchs():
    y, vjp = jax.vjp(lambda z: clipped_relu(z, 1.5), jnp.asarray(TORCH["z"]))
    np.testing.assert_array_equal(y, TORCH["clipped_relu"].astype(np.float32))
    slope = vjp(jnp.ones_like(y))[0]
    np.testing.assert_array_equal(slope, TORCH["clipped_relu_slope"])


def test_six_is_relu6():
    x = jnp.linspace(-2, 8, 41)
    np.testing.assert_array_equal(clipped_relu(x), jax.nn.relu6(x))


def test_special_values():
    x = jnp.asarray([jnp.inf, -jnp.inf, jnp.nan, -0.0])
    np.testing.assert_array_equal(clipped_relu(x, 2.0), [2, 0, np.nan, 0])


@pytest.mark.parametrize("ceiling", [0.0, -1.0, float("nan")])
def test_a_ceiling_must_be_positive(ceiling):
    with pytest.raises(ValueError, match="clipped_relu: `ceiling` must be positive"):
        clipped_relu(jnp.ones(2), ceiling)
