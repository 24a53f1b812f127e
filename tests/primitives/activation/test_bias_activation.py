"""bias_activation: every activation against PyTorch's values in float64."""

from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import bias_activation
from jaxkern.primitives.activation.activations import ACTIVATIONS, Activation
from jaxkern.testing.checks import bf16, case, f32

CASES = [
    case(
        "plain",
        x=f32(8, 2, 4),
        bias=f32(4),
        activation="gelu_tanh",
    ),
    case("odd", x=bf16(3, 7), bias=bf16(7), activation="silu"),
    case("absent", x=f32(8, 6), bias=None, activation="elu", coefficient=0.5),
    case("empty", x=f32(0, 4), bias=f32(4), activation="tanh"),
    case("bert_base", x=bf16(512, 3072), bias=bf16(3072), activation="gelu", full=True),
]
TORCH = np.load(Path(__file__).parents[2] / "golden" / "torch_activations.npz")
COEFFICIENTS = {"clipped_relu": 1.5, "elu": 0.7}  # of make_torch_activations.py
FORMULAS = {  # of those that PyTorch has no function for
    "none": lambda z: (z, np.ones_like(z)),
    "relu2": lambda z: (np.maximum(z, 0) ** 2, 2 * np.maximum(z, 0)),
}


@pytest.mark.parametrize("activation", get_args(Activation))
def test_values_and_derivatives_are_pytorchs(activation):
    def f(x, bias):
        coefficient = COEFFICIENTS.get(activation)
        return bias_activation(x, bias, activation=activation, coefficient=coefficient)

    if activation in FORMULAS:
        expected_y, slope = FORMULAS[activation](np.float64(TORCH["z"]))
    else:
        expected_y, slope = TORCH[activation], TORCH[f"{activation}_slope"]
    half = jnp.asarray(TORCH["z"] / 2)
    y, vjp = jax.vjp(f, half[None], half)
    np.testing.assert_allclose(y[0], expected_y, 1e-5, 1e-8)
    dy = np.linspace(-2, 3, half.size, dtype=np.float32)
    dx, dbias = vjp(jnp.asarray(dy)[None])
    expected = dy * slope
    np.testing.assert_allclose(dx[0], expected, 1e-5, 1e-7)
    np.testing.assert_allclose(dbias, expected, 1e-5, 1e-7)


@pytest.mark.parametrize("activation, corners", [("relu", 1), ("clipped_relu", 2)])
def test_the_derivative_at_a_corner_is_zero_where_that_of_clip_is_a_half(
    activation, corners
):
    x = jnp.asarray([0.0, 6.0])[:corners]
    grad = jax.grad(lambda x: bias_activation(x, None, activation=activation).sum())
    np.testing.assert_array_equal(grad(x), jnp.zeros(corners))
    halved = jax.grad(lambda x: jnp.clip(x, 0, 6).sum())(x)
    np.testing.assert_array_equal(halved, jnp.full(corners, 0.5))


def test_the_sum_is_not_rounded_before_the_activation():
    x = jnp.full((1, 1), 256.0, jnp.bfloat16)
    bias = jnp.full(1, -255.5)  # a bfloat16 sum would be 0
    y = bias_activation(x, bias, activation="sigmoid")
    expected = jax.nn.sigmoid(jnp.float32(0.5)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(y, expected)


def test_the_gradient_of_the_bias_sums_in_float32():
    x, bias = jnp.ones((4096, 1), jnp.bfloat16), jnp.zeros(1, jnp.bfloat16)
    grad = jax.grad(
        lambda b: bias_activation(x, b, activation="relu").astype(jnp.float32).sum()
    )
    np.testing.assert_array_equal(np.float32(grad(bias)), [4096])


@pytest.mark.parametrize("activation", get_args(Activation))
def test_nan_propagates_and_large_values_are_finite(activation):
    large = 1e18 if activation == "relu2" else 1e38  # whose square is finite
    x = jnp.asarray([jnp.nan, large, -large])
    y, vjp = jax.vjp(lambda x: bias_activation(x, None, activation=activation), x)
    assert np.isnan(y[0]) and np.isfinite(y[1:]).all()
    assert np.isfinite(vjp(jnp.ones(3))[0][1:]).all()


def test_every_activation_has_a_row():
    assert set(ACTIVATIONS) == set(get_args(Activation))


def test_errors_say_what_to_do():
    x = jnp.ones((2, 3))
    with pytest.raises(ValueError, match="bias_activation: `activation` must be one"):
        bias_activation(x, None, activation="swish")
    with pytest.raises(ValueError, match="relu has no `coefficient`, got 2"):
        bias_activation(x, None, activation="relu", coefficient=2.0)
    with pytest.raises(ValueError, match="`coefficient` of elu must be positive"):
        bias_activation(x, None, activation="elu", coefficient=0.0)
    with pytest.raises(TypeError, match="dim `d` is 3 in `x` but 2 in `bias`"):
        bias_activation(x, jnp.ones(2), activation="relu")
