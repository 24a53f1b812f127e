"""sigmoid_gate against its formula in NumPy float64, and its edge cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import sigmoid_gate, swiglu
from jaxkern.testing.checks import bf16, case, f32

CASES = [
    case("plain", x=f32(8, 2, 4), gate=f32(8, 2, 4)),
    case("odd", x=bf16(3, 7), gate=f32(3, 7)),
    case("scalar", x=f32(), gate=f32()),
    case("empty", x=f32(0, 4), gate=f32(0, 4)),
    case("qwen3_next_decode", x=bf16(4, 4096), gate=bf16(4, 4096), full=True),
]


@pytest.mark.parametrize("dtype, rtol", [("float32", 1e-6), ("bfloat16", 4e-3)])
def test_values_and_gradients_match_the_formula(dtype, rtol):
    rng = np.random.default_rng(0)
    x, gate, dy = (
        np.asarray(jnp.asarray(3 * rng.standard_normal((5, 16)), dtype), np.float64)
        for _ in range(3)
    )
    y, vjp = jax.vjp(sigmoid_gate, jnp.asarray(x, dtype), jnp.asarray(gate, dtype))
    s = 1 / (1 + np.exp(-gate))
    assert y.dtype == dtype
    np.testing.assert_allclose(np.float64(y), x * s, rtol)
    dx, dgate = vjp(jnp.asarray(dy, dtype))
    np.testing.assert_allclose(np.float64(dx), dy * s, rtol)
    np.testing.assert_allclose(np.float64(dgate), dy * x * s * (1 - s), rtol, 1e-7)


def test_the_gate_is_no_silu():
    x, gate = jnp.asarray([2.0]), jnp.asarray([3.0])
    y = sigmoid_gate(x, gate)
    np.testing.assert_allclose(y * gate, swiglu(gate, x), 1e-6)
    assert abs(float(y[0] - swiglu(gate, x)[0])) > 1


def test_an_open_gate_keeps_its_small_derivative():
    dgate = jax.grad(lambda g: sigmoid_gate(jnp.float32(1), g))(jnp.float32(30))
    np.testing.assert_allclose(dgate, np.exp(-30.0), 1e-5)


def test_special_values():
    x, gate = jnp.ones(4), jnp.asarray([jnp.inf, -jnp.inf, 1e38, jnp.nan])
    y, vjp = jax.vjp(sigmoid_gate, x, gate)
    np.testing.assert_array_equal(y, [1, 0, 1, np.nan])
    np.testing.assert_array_equal(vjp(x)[1][:3], [0, 0, 0])


def test_shapes_must_agree():
    with pytest.raises(TypeError, match="sigmoid_gate: the leading dims are"):
        sigmoid_gate(jnp.ones((2, 3)), jnp.ones(3))
