"""GeGLU against its formulas in NumPy float64, and its edge cases."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.primitives.activation.geglu import geglu
from jaxkern.testing.checks import bf16, case, f32

CASES = [
    case("gemma2_9b_decode", gate=bf16(4, 14336), up=bf16(4, 14336)),
    case("odd", gate=f32(3, 7, 13), up=f32(3, 7, 13)),
    case("exact", gate=f32(8, 4, 16), up=f32(8, 4, 16), approximate="none"),
    case("scalar", gate=f32(), up=f32()),
    case("empty", gate=f32(0, 4), up=f32(0, 4)),
]


def gelu(z, approximate):
    if approximate == "none":
        return z * np.vectorize(math.erfc)(-z / math.sqrt(2)) / 2
    # expm1 form: 1 + tanh(u) = 2 / (1 + exp(-2 u)) without cancellation
    return z / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def gelu_slope(z, approximate, h=1e-5):
    return (gelu(z + h, approximate) - gelu(z - h, approximate)) / (2 * h)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype, rtol", [("float32", 3e-6), ("bfloat16", 4e-3)])
def test_values_and_gradients_match_the_formula(dtype, rtol, approximate):
    rng = np.random.default_rng(0)
    gate, up, dy = (
        np.asarray(jnp.asarray(3 * rng.standard_normal((5, 64)), dtype), np.float64)
        for _ in range(3)
    )

    def f(gate, up):
        return geglu(gate, up, approximate=approximate)

    y, vjp = jax.vjp(f, jnp.asarray(gate, dtype), jnp.asarray(up, dtype))
    value = gelu(gate, approximate)
    np.testing.assert_allclose(np.float64(y), value * up, rtol, 1e-9)
    dgate, dup = vjp(jnp.asarray(dy, dtype))
    slope = gelu_slope(gate, approximate)
    np.testing.assert_allclose(np.float64(dgate), dy * up * slope, rtol, 1e-5)
    np.testing.assert_allclose(np.float64(dup), dy * value, rtol, 1e-9)


def test_tanh_form_is_the_published_formula():
    z = np.linspace(-3, 3, 61)
    u = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
    y = geglu(jnp.asarray(z, jnp.float32), jnp.ones(61))
    np.testing.assert_allclose(y, z / 2 * (1 + np.tanh(u)), 1e-5, 1e-7)


def test_small_results_keep_their_relative_accuracy():
    z = np.asarray([-3.0, -4.0, -5.0])
    for approximate in ("tanh", "none"):
        y = geglu(jnp.asarray(z, jnp.float32), jnp.ones(3), approximate=approximate)
        np.testing.assert_allclose(y, gelu(z, approximate), 1e-5)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_large_values_have_finite_derivatives(approximate):
    gate = jnp.asarray([-3e38, -1e20, -30.0, 30.0, 1e20, 3e38])

    def f(gate):
        return geglu(gate, jnp.ones(6), approximate=approximate)

    np.testing.assert_array_equal(f(gate), jnp.maximum(gate, 0))
    step = (gate > 0).astype(jnp.float32)
    np.testing.assert_array_equal(jax.vjp(f, gate)[1](jnp.ones(6))[0], step)
    np.testing.assert_array_equal(jax.jvp(f, (gate,), (jnp.ones(6),))[1], step)
    second = jax.jvp(jax.grad(lambda x: f(x).sum()), (gate,), (jnp.ones(6),))[1]
    np.testing.assert_array_equal(second, jnp.zeros(6))


def test_nan_propagates():
    assert np.isnan(geglu(jnp.asarray([jnp.nan, -jnp.inf]), jnp.ones(2))).all()


def test_packed_has_the_gate_first():
    packed = jnp.asarray([[1.0, 2.0, 3.0, 4.0]])
    np.testing.assert_array_equal(geglu(packed), geglu(packed[:, :2], packed[:, 2:]))


def test_errors_say_what_to_do():
    with pytest.raises(
        ValueError, match="geglu: `approximate` must be 'tanh' or 'none'"
    ):
        geglu(jnp.ones(4), approximate="erf")
    with pytest.raises(TypeError, match="geglu: packed `gate`"):
        geglu(jnp.ones(5))
