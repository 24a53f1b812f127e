"""glu: each gate against its formula in NumPy float64."""

import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import geglu, glu, swiglu
from jaxkern.primitives.activation.activations import Activation
from jaxkern.testing.checks import bf16, case, f32

CASES = [
    case("reglu", gate=f32(8, 16), up=f32(8, 16), activation="relu"),
    case("bilinear", gate=bf16(3, 7), up=bf16(3, 7), activation="none"),
    case("glu", gate=f32(4, 6), up=f32(4, 6)),
    case("empty", gate=f32(0, 4), up=f32(0, 4), activation="relu2"),
]
FORMULAS = {
    "none": lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "relu2": lambda z: np.maximum(z, 0) ** 2,
    "clipped_relu": lambda z: np.clip(z, 0, 6),
    "elu": lambda z: np.where(z > 0, z, np.exp(z) - 1),
    "gelu": lambda z: z * np.vectorize(math.erfc)(-z / math.sqrt(2)) / 2,
    "gelu_tanh": lambda z: (
        z / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    ),
    "silu": lambda z: z / (1 + np.exp(-z)),
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "tanh": np.tanh,
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_values_and_gradients_match_the_formula(activation, packed):
    """The slope of the gate by central differences of the formula."""
    rng = np.random.default_rng(0)
    gate, up, dy = (3 * rng.standard_normal((5, 8)) for _ in range(3))

    def f(gate, up):
        args = (jnp.concatenate([gate, up], -1),) if packed else (gate, up)
        return glu(*args, activation=activation)

    act, h = FORMULAS[activation], 1e-5
    with jax.enable_x64(True):
        y, vjp = jax.vjp(f, jnp.asarray(gate), jnp.asarray(up))
        dgate, dup = vjp(jnp.asarray(dy))
    slope = (act(gate + h) - act(gate - h)) / (2 * h)
    np.testing.assert_allclose(y, act(gate) * up, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(dup, dy * act(gate), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(dgate, dy * up * slope, rtol=1e-6, atol=1e-8)


def test_two_of_its_names_have_operators_of_their_own():
    gate, up = jax.random.normal(jax.random.key(0), (2, 5, 8))
    np.testing.assert_array_equal(glu(gate, up, activation="silu"), swiglu(gate, up))
    y = glu(gate, up, activation="gelu")
    np.testing.assert_array_equal(y, geglu(gate, up, approximate="none"))


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="glu: `activation` must be one of none, relu"):
        glu(jnp.ones(4), activation="swish")
    with pytest.raises(TypeError, match=r"glu: packed `gate` .* \(3, 5\). Give `up`"):
        glu(jnp.ones((3, 5)))
