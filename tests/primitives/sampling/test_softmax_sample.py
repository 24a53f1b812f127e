"""softmax_sample against NumPy's inverse CDF; u = 0; the gradient of the logprob."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import softmax_sample
from jaxkern.testing.checks import bf16, case, f32, uniform

CASES = [
    case(
        "plain",
        logits=f32(4, 5),
        uniform=uniform(4),
        temperature=uniform(4, low=0.5, high=1.5),
    ),
    case("row", logits=bf16(3), uniform=uniform(), temperature=uniform(low=0.5)),
    case(
        "llama3_vocab",
        logits=bf16(4, 128256, scale=3),
        uniform=uniform(4),
        temperature=uniform(4, low=0.5),
        full=True,
    ),
]
INF, NAN = np.inf, np.nan
ALMOST_1 = np.float32(1 - 2.0**-24)


def log_softmax(z):
    return z - z.max() - np.log(np.exp(z - z.max()).sum())


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_tokens_and_logprobs_match_the_inverse_cdf(temperature):
    logits = np.random.default_rng(0).standard_normal(9)
    u = (np.arange(512, dtype=np.float32) + 0.5) / 512
    logprobs = log_softmax(logits / temperature)
    tokens = np.searchsorted(np.cumsum(np.exp(logprobs)), u, side="right")
    rows = jnp.broadcast_to(jnp.float32(logits), (512, 9))
    token, logprob = softmax_sample(rows, jnp.asarray(u), temperature=temperature)
    np.testing.assert_array_equal(token, tokens)
    np.testing.assert_allclose(logprob, logprobs[tokens], 1e-5, 1e-6)


def test_u_zero_never_draws_a_token_of_probability_zero():
    """The first i with cdf >= 0 would be token 0."""
    token, logprob = softmax_sample(jnp.asarray([-INF, 2.0, 1.0, -INF]), 0.0)
    assert token == 1
    np.testing.assert_allclose(logprob, -np.log1p(np.exp(-1)), 1e-6)
    token, _ = softmax_sample(jnp.asarray([-INF, 2.0, 1.0, -INF]), ALMOST_1)
    assert token == 2


def test_the_gradient_of_the_logprob_is_the_score_function():
    z = np.random.default_rng(1).standard_normal(7)
    temperature, p = 0.7, np.exp(log_softmax(z / 0.7))

    def logprob(logits, temperature):
        token, logprob = softmax_sample(logits, 0.4, temperature=temperature)
        return logprob, token

    grads, token = jax.grad(logprob, (0, 1), has_aux=True)(
        jnp.float32(z), jnp.float32(temperature)
    )
    picked = np.arange(7) == token
    np.testing.assert_allclose(grads[0], (picked - p) / temperature, 1e-5, 1e-6)
    expected = ((p * z).sum() - z[token]) / temperature**2
    np.testing.assert_allclose(grads[1], expected, 1e-5)


def test_temperature_zero_is_argmax_with_certainty():
    token, logprob = softmax_sample(jnp.asarray([1.0, 3.0, 3.0]), 0.9, temperature=0.0)
    assert token == 1 and logprob == 0
    token, logprob = jax.jit(softmax_sample)(jnp.asarray([1.0, 3.0]), 0.5)
    assert token == 1
    infinite = softmax_sample(jnp.asarray([0.0, 9.0]), 0.2, temperature=INF)
    assert infinite[0] == 0
    np.testing.assert_allclose(infinite[1], -np.log(2), 1e-6)


@pytest.mark.parametrize(
    "logits, token, logprob",
    [
        ([NAN, 0.0, NAN, 0.0], 1, -np.log(2)),
        ([0.0, INF, 5.0, INF], 1, -np.log(2)),
        ([3e38, -3e38, -INF, NAN], 0, 0),
        ([-INF, -INF, NAN, -INF], 0, -INF),
    ],
)
def test_special_logits_have_finite_gradients(logits, token, logprob):
    def f(logits, temperature):
        drawn, logprob = softmax_sample(logits, 0.2, temperature=temperature)
        return logprob, drawn

    (value, drawn), grads = jax.value_and_grad(f, (0, 1), has_aux=True)(
        jnp.asarray(logits), jnp.float32(0.5)
    )
    assert drawn == token
    np.testing.assert_allclose(value, logprob, 1e-6)
    assert all(np.isfinite(g).all() for g in grads)


def test_errors_say_what_to_do():
    with pytest.raises(TypeError, match=r"softmax_sample: `uniform` of shape \(3,\)"):
        softmax_sample(jnp.ones((2, 4)), jnp.ones(3))
    with pytest.raises(ValueError, match="v is 0"):
        softmax_sample(jnp.ones((2, 0)), 0.5)
