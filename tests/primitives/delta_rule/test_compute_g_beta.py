"""compute_g_beta: the formula, the sign of the decay, large inputs, the converter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import compute_g_beta, log_decay_from_positive
from jaxkern.testing.checks import bf16, case, f32

CASES = [
    case("plain", a=f32(2, 3, 4), b=f32(2, 3, 4), a_log=f32(4), dt_bias=f32(4)),
    case("no_tokens", a=f32(0, 2), b=f32(0, 2), a_log=f32(2), dt_bias=f32(2)),
    case(
        "qwen3_next",
        full=True,
        a=bf16(1, 128, 32),
        b=bf16(1, 128, 32),
        a_log=f32(32),
        dt_bias=f32(32),
    ),
]


def test_values_match_the_formula():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 5, 3))
    a_log, dt_bias = rng.standard_normal((2, 3))
    g, beta = compute_g_beta(*map(jnp.float32, (a, b, a_log, dt_bias)))
    expected = -np.exp(a_log) * np.log1p(np.exp(a + dt_bias))
    np.testing.assert_allclose(g, expected, rtol=1e-6)
    np.testing.assert_allclose(beta, 1 / (1 + np.exp(-b)), rtol=1e-6)


def test_the_log_decay_is_never_positive_and_its_gradient_is_finite():
    # defect D8: two conventions; here the state decays by exp(g), so g <= 0 always
    a = jnp.array([[-100.0, -21, 0, 21, 100]])
    zeros = jnp.zeros(5)
    g, beta = compute_g_beta(a, a, zeros, zeros)
    assert (g <= 0).all() and (g[0, 2:] < 0).all()
    np.testing.assert_allclose(g[0, 3:], [-21, -100], rtol=1e-6)
    assert ((beta >= 0) & (beta <= 1)).all()
    grads = jax.grad(lambda *x: sum(y.sum() for y in compute_g_beta(*x)), (0, 1, 2, 3))
    assert all(np.isfinite(d).all() for d in grads(a, a, zeros, zeros))


def test_a_positive_decay_rate_becomes_a_log_decay():
    # the origin's g = softplus(a + dt_bias) * -ssm_a, from a GGUF's ssm_a = -exp(a_log)
    a, a_log, dt_bias = jnp.array([0.3, -2.0]), jnp.array([0.5, 1.0]), jnp.ones(2)
    positive = jnp.logaddexp(a + dt_bias, 0) * jnp.exp(a_log)
    g, _ = compute_g_beta(a, a, jnp.log(jnp.exp(a_log)), dt_bias)
    np.testing.assert_allclose(log_decay_from_positive(positive), g, rtol=1e-6)


def test_half_precision_projections_give_float32_gates():
    a = jnp.ones((2, 3), jnp.bfloat16)
    g, beta = compute_g_beta(a, a, jnp.zeros(3), jnp.zeros(3))
    assert g.dtype == beta.dtype == jnp.float32


def test_errors_name_the_dims():
    a = jnp.ones((2, 3))
    with pytest.raises(TypeError, match="compute_g_beta: dim `n` is 3 in `a` but 4"):
        compute_g_beta(a, a, jnp.ones(4), jnp.ones(3))
