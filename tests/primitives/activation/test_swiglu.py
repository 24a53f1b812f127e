"""SwiGLU against its formula in NumPy float64, and its edge cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.primitives.activation.swiglu import swiglu
from jaxkern.testing.checks import bf16, case, f32

APART = [
    case("llama3_8b_decode", gate=bf16(4, 14336), up=bf16(4, 14336)),
    case("smollm2_prefill", gate=f32(64, 1536), up=f32(64, 1536)),
    case("odd", gate=f32(3, 7, 13), up=f32(3, 7, 13)),
    case("even", gate=f32(8, 4, 16), up=f32(8, 4, 16)),
    case("gpt_oss", gate=f32(8, 6), up=f32(8, 6), alpha=1.702, limit=1.5, up_offset=1),
    case("scalar", gate=f32(), up=f32()),
    case("empty", gate=f32(0, 4), up=f32(0, 4)),
]
PACKED = [
    case("even", gate_up=f32(8, 4, 16)),
    case("odd", gate_up=f32(3, 7, 26)),
    case("row", gate_up=f32(10)),
    case("gpt_oss", gate_up=f32(8, 12), alpha=1.702, limit=1.5, up_offset=1.0),
    case("llama_1b_training", full=True, gate_up=bf16(64, 11264)),
    case("empty", gate_up=f32(0, 4)),
]
CASES = {"swiglu": APART, "packed_swiglu": PACKED}


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


def gpt_oss(gate, up, dy, alpha, limit, offset):
    """Value and gradients in float64, as the model's own code writes them."""
    z, u = np.minimum(gate, limit), np.clip(up, -limit, limit)
    s = 1 / (1 + np.exp(-alpha * z))
    dgate = dy * (u + offset) * s * (1 + alpha * z * (1 - s)) * (gate <= limit)
    return z * s * (u + offset), dgate, dy * z * s * (abs(up) <= limit)


@pytest.mark.parametrize("packed", [False, True])
def test_gpt_oss_bounds_both_sides_and_opens_up(packed):
    """Operands reach beyond the limit on each side and lie on it."""
    gate, up, dy = operands()
    gate[0, :2], up[0, :3] = [2.5, -2.5], [2.5, -2.5, 0]
    assert (gate > 2.5).any() and (gate < -2.5).any() and (abs(up) > 2.5).any()

    def f(gate, up):
        args = (jnp.concatenate([gate, up], -1),) if packed else (gate, up)
        return swiglu(*args, alpha=1.702, limit=2.5, up_offset=1.0)

    with jax.enable_x64(True):
        y, vjp = jax.vjp(f, jnp.asarray(gate), jnp.asarray(up))
        found = (y, *vjp(jnp.asarray(dy)))
        expected = gpt_oss(gate, up, dy, 1.702, 2.5, 1.0)
    for a, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-12, atol=1e-14)


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
    with pytest.raises(ValueError, match="swiglu: `limit` must be positive"):
        swiglu(jnp.ones(4), limit=0.0)
    with pytest.raises(ValueError, match="swiglu: `alpha` must be finite, got nan"):
        swiglu(jnp.ones(4), alpha=float("nan"))
