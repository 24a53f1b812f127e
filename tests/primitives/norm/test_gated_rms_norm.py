"""gated_rms_norm: formula and gradient in both orders; the gate is SiLU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import gated_rms_norm
from jaxkern.testing.checks import bf16, case, f16, f32

CASES = [
    case(
        "qwen3_next_decode",
        x=bf16(2, 32, 128),
        gate=bf16(2, 32, 128),
        weight=f32(128),
    ),
    case(
        "mamba2_2p7b",
        x=bf16(4, 5120),
        gate=bf16(4, 5120),
        weight=bf16(5120),
        eps=1e-5,
        norm_before_gate=False,
    ),
    case("plain", x=f32(8, 4, 16), gate=f32(8, 4, 16), weight=f32(16)),
    case(
        "gate_first",
        x=f32(2, 8),
        gate=f32(2, 8),
        weight=f32(8),
        eps=0.1,
        norm_before_gate=False,
    ),
    case("no_weight", x=f32(3, 7, 13), gate=f32(3, 7, 13)),
    case("gate_first_bare", x=f32(2, 3), gate=f32(2, 3), norm_before_gate=False),
    case("one_element", x=f32(5, 1), gate=f32(5, 1), weight=f32(1), eps=0.1),
    case("row", x=f16(130), gate=f16(130), weight=f16(130)),
    case("empty", x=f32(0, 16), gate=f32(0, 16), weight=f32(16)),
]
EPS = 0.1


def silu(z):
    return z / (1 + np.exp(-z))


def formula(x, gate, weight, norm_before_gate):
    u = x if norm_before_gate else x * silu(gate)
    y = u / np.sqrt((u**2).mean(-1, keepdims=True) + EPS) * weight
    return y * silu(gate) if norm_before_gate else y


def gradients(x, gate, weight, dy, norm_before_gate):
    """By central differences of the formula in float64."""

    def slope(k, index):
        values = []
        for step in (1e-6, -1e-6):
            operands = [x.copy(), gate.copy(), weight.copy()]
            operands[k][index] += step
            values.append((dy * formula(*operands, norm_before_gate)).sum())
        return (values[0] - values[1]) / 2e-6

    return [
        np.reshape([slope(k, i) for i in np.ndindex(v.shape)], v.shape)
        for k, v in enumerate((x, gate, weight))
    ]


@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_values_and_gradients_match_the_formula(norm_before_gate):
    rng = np.random.default_rng(0)
    x, gate, dy = rng.normal(size=(3, 4, 9))
    weight = rng.normal(size=9)
    y, vjp = jax.vjp(
        lambda *operands: gated_rms_norm(
            *operands, eps=EPS, norm_before_gate=norm_before_gate
        ),
        *map(jnp.float32, (x, gate, weight)),
    )
    expected = formula(x, gate, weight, norm_before_gate)
    np.testing.assert_allclose(y, expected, atol=2e-6)
    expected = gradients(x, gate, weight, dy, norm_before_gate)
    for g, e in zip(vjp(jnp.float32(dy)), expected, strict=True):
        np.testing.assert_allclose(g, e, atol=1e-5)


def test_the_gate_is_silu_and_not_a_sigmoid():
    y = gated_rms_norm(jnp.ones((1, 2)), jnp.asarray([[2.0, -2.0]]), eps=0.0)
    np.testing.assert_allclose(y, [[2 / (1 + np.exp(-2)), -2 / (1 + np.exp(2))]], 1e-6)


def test_the_order_of_norm_and_gate_matters():
    x, gate = jnp.asarray([[3.0, 3.0]]), jnp.asarray([[20.0, 40.0]])  # silu(z) = z
    y = gated_rms_norm(x, gate, eps=0.0)
    np.testing.assert_allclose(y, [[20, 40]], rtol=1e-6)
    y = gated_rms_norm(x, gate, eps=0.0, norm_before_gate=False)
    np.testing.assert_allclose(y, [[0.4**0.5, 1.6**0.5]], rtol=1e-6)


@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_large_half_precision_values_do_not_overflow(norm_before_gate):
    x, gate = jnp.full((2, 8), 6e4, jnp.float16), jnp.full((2, 8), 1e3, jnp.float16)
    y, vjp = jax.vjp(
        lambda x, gate: gated_rms_norm(x, gate, norm_before_gate=norm_before_gate),
        x,
        gate,
    )
    np.testing.assert_array_equal(y, np.full((2, 8), 1e3 if norm_before_gate else 1))
    for g in vjp(jnp.ones((2, 8), jnp.float16)):
        assert np.isfinite(g).all()


def test_a_closed_gate_gives_zero():
    x, gate = jnp.ones((1, 4)), jnp.full((1, 4), -1e3)
    for norm_before_gate in (True, False):
        y = gated_rms_norm(x, gate, norm_before_gate=norm_before_gate)
        np.testing.assert_array_equal(y, np.zeros((1, 4)))
