"""linear_log_probs and linear_dpo: equal to plain logits in float64, without them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import linear_dpo, linear_log_probs

IGNORED = -100


def draw(*shape, seed=0):
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return jnp.asarray(values, jnp.float32)


X, WEIGHT = draw(2, 3, 4, 6), draw(11, 6)
LABELS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 3, 4)))
LABELS = LABELS.at[0, 1, 2:].set(IGNORED).at[1, 2, 0].set(IGNORED)
REFERENCE = -10 + draw(2, 3)


def log_probs(x, weight):
    every = jax.nn.log_softmax(x @ weight.T)
    label = jnp.where(LABELS == IGNORED, 0, LABELS)
    picked = jnp.take_along_axis(every, label[..., None], axis=-1)[..., 0]
    return jnp.where(LABELS == IGNORED, 0, picked)


def plain_dpo(x, weight, reference, beta, label_smoothing, average):
    y = log_probs(x, weight).sum(-1)
    if average:
        y = y / (LABELS != IGNORED).sum(-1)
    chosen, rejected = beta * (y - reference)
    right = 1 / (1 + jnp.exp(rejected - chosen))
    e = label_smoothing
    return -(1 - e) * jnp.log(right) - e * jnp.log(1 - right)


@pytest.mark.parametrize("block_size", [1, 4, None])
def test_log_probs_and_their_gradients(block_size):
    cotangent = draw(2, 3, 4, seed=2)
    with jax.enable_x64(True):
        wide = X.astype(jnp.float64), WEIGHT.astype(jnp.float64)
        expected, expected_pull = jax.vjp(log_probs, *wide)
        expected_gradients = expected_pull(cotangent.astype(jnp.float64))
    actual, pull = jax.vjp(
        lambda x, w: linear_log_probs(x, w, LABELS, block_size=block_size), X, WEIGHT
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    for g, e in zip(pull(cotangent), expected_gradients, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_dpo_and_its_gradients(label_smoothing, average):
    options = dict(beta=0.3, label_smoothing=label_smoothing, average=average)
    cotangent = draw(3, seed=3)
    with jax.enable_x64(True):
        wide = [a.astype(jnp.float64) for a in (X, WEIGHT, REFERENCE)]
        expected, expected_pull = jax.vjp(lambda *a: plain_dpo(*a, **options), *wide)
        expected_gradients = expected_pull(cotangent.astype(jnp.float64))

    def dpo(x, weight, reference):
        return linear_dpo(x, weight, LABELS, reference, block_size=4, **options)[0]

    actual, pull = jax.vjp(dpo, X, WEIGHT, REFERENCE)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    for g, e in zip(pull(cotangent), expected_gradients, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-5)


def test_a_policy_that_is_its_reference_earns_nothing():
    reference = linear_log_probs(X, WEIGHT, LABELS).sum(-1)
    loss, reward = linear_dpo(X, WEIGHT, LABELS, reference)
    np.testing.assert_allclose(reward, 0, atol=1e-5)
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-5)


def test_a_margin_beyond_the_range_of_exp():
    reference = jnp.array([[1e4] * 3, [-1e4] * 3])
    loss, _ = linear_dpo(X, WEIGHT, LABELS, reference, beta=1.0)
    np.testing.assert_allclose(loss, 2e4, rtol=1e-2)


def test_the_logits_are_never_in_memory():
    b, t, v, d = 4, 64, 8192, 8
    x, weight = draw(2, b, t, d), draw(v, d)
    labels, reference = jnp.zeros((2, b, t), jnp.int32), jnp.zeros((2, b))

    def loss(x, weight):
        return linear_dpo(x, weight, labels, reference, block_size=128)[0].mean()

    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, weight).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * b * t * v * 4 / 8


def test_every_error_says_what_to_do():
    with pytest.raises(ValueError, match=r"linear_dpo: `beta` must be positive"):
        linear_dpo(X, WEIGHT, LABELS, REFERENCE, beta=0.0)
    with pytest.raises(ValueError, match=r"`label_smoothing` must lie in \[0, 0.5\)"):
        linear_dpo(X, WEIGHT, LABELS, REFERENCE, label_smoothing=0.5)
    with pytest.raises(TypeError, match=r"`reference_log_probs`"):
        linear_dpo(X, WEIGHT, LABELS, REFERENCE[:, :2])
    with pytest.raises(TypeError, match=r"`labels`"):
        linear_dpo(X, WEIGHT, LABELS[..., :2], REFERENCE)
