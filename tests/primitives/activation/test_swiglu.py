"""SwiGLU against its formula in NumPy float64, and its edge cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.primitives.activation.swiglu import swiglu
from tests.checks import bf16, case, f32

CASES = [
    case("llama3_8b_decode", gate=bf16(4, 14336), up=bf16(4, 14336)),
    case("smollm2_prefill", gate=f32(64, 1536), up=f32(64, 1536)),
    case("odd", gate=f32(3, 7, 13), up=f32(3, 7, 13)),
    case("even", gate=f32(8, 4, 16), up=f32(8, 4, 16)),
    case("scalar", gate=f32(), up=f32()),
    case("empty", gate=f32(0, 4), up=f32(0, 4)),
]


def formula(gate, up):
    return gate / (1 + np.exp(-gate)) * up


def gradients(gate, up, dy):
    s = 1 / (1 + np.exp(-gate))
    return dy * up * s * (1 + gate * (1 - s)), dy * gate * s


def operands(shape=(5, 64), scale=3.0):
    rng = np.random.default_rng(0)
    return [scale * rng.standard_normal(shape) for _ in range(3)]


@pytest.mark.parametrize("dtype, rtol", [("float32", 1e-6), ("bfloat16", 4e-3)])
def test_values_and_gradients_match_the_formula(dtype, rtol):
    gate, up, dy = (np.asarray(jnp.asarray(x, dtype), np.float64) for x in operands())
    y, vjp = jax.vjp(swiglu, jnp.asarray(gate, dtype), jnp.asarray(up, dtype))
    assert y.dtype == dtype
    np.testing.assert_allclose(np.float64(y), formula(gate, up), rtol, 1e-7)
    for g, e in zip(vjp(jnp.asarray(dy, dtype)), gradients(gate, up, dy), strict=True):
        assert g.dtype == dtype
        np.testing.assert_allclose(np.float64(g), e, rtol, 1e-5)


def test_packed_has_the_gate_first():
    gate, up, _ = operands()
    packed = jnp.asarray(np.concatenate([gate, up], -1), jnp.float32)
    expected = formula(gate, up)
    np.testing.assert_allclose(swiglu(packed), expected, 1e-6, 1e-7)
    assert not np.allclose(swiglu(packed), formula(up, gate))


def test_dtypes_promote():
    gate, up = jnp.ones(4, jnp.bfloat16), jnp.ones(4, jnp.float32)
    assert swiglu(gate, up).dtype == jnp.float32
    assert swiglu(gate, gate).dtype == jnp.bfloat16


def test_large_values_are_finite_and_special_values_are_ieee():
    gate = jnp.asarray([-1e30, 1e30, -200.0, jnp.inf, -jnp.inf, jnp.nan])
    y, vjp = jax.vjp(swiglu, gate, jnp.ones(6))
    np.testing.assert_array_equal(y[:3], [0, gate[1], 0])
    np.testing.assert_array_equal(y[3:], [np.inf, np.nan, np.nan])
    dgate, dup = vjp(jnp.ones(6))
    np.testing.assert_array_equal(dgate[:3], [0, 1, 0])
    np.testing.assert_array_equal(dup[:3], [0, gate[1], 0])


def test_errors_say_what_to_do():
    with pytest.raises(
        TypeError, match=r"swiglu: packed `gate` .* \(3, 5\). Give `up`"
    ):
        swiglu(jnp.ones((3, 5)))
    with pytest.raises(TypeError, match="swiglu: "):
        swiglu(jnp.ones((3, 4)), jnp.ones((3, 5)))
