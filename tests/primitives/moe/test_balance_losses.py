"""The losses of a router against loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import load_balance_loss, router_z_loss


def shares(logits, score):
    s = np.exp(logits) if score == "softmax" else 1 / (1 + np.exp(-logits))
    return s / s.sum(-1, keepdims=True)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_load_balance_loss(score):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((3, 7, 5))
    ids = np.argsort(-logits)[..., :2]
    total = 0.0
    for sequence, chosen in zip(logits, ids, strict=True):
        load = np.bincount(chosen.ravel(), minlength=5) / (7 * 2)
        total += 5 * (load * shares(sequence, score).mean(0)).sum()
    with jax.enable_x64(True):
        loss = load_balance_loss(logits, ids, score=score)
    np.testing.assert_allclose(loss, total / 3, rtol=1e-12)


def test_is_1_if_even_and_e_if_all_go_to_one():
    even = load_balance_loss(jnp.zeros((4, 4)), jnp.arange(4)[:, None])
    np.testing.assert_allclose(even, 1, rtol=1e-6)
    one = jnp.zeros((4, 4)).at[:, 1].set(50.0)
    np.testing.assert_allclose(load_balance_loss(one, jnp.ones((4, 1), int)), 4, 1e-6)


def test_padding_does_not_count():
    rng = np.random.default_rng(0)
    logits, ids = jnp.float32(rng.standard_normal((2, 6, 4))), jnp.ones((2, 6, 2), int)
    where = jnp.asarray([[True] * 4 + [False] * 2, [False] * 6])
    loss = load_balance_loss(logits, ids, where=where)
    alone = load_balance_loss(logits[0, :4], ids[0, :4])
    np.testing.assert_allclose(loss, alone / 2, rtol=1e-6)
    z = router_z_loss(logits, where=where)
    np.testing.assert_allclose(z, router_z_loss(logits[0, :4]), rtol=1e-6)
    assert router_z_loss(logits[:0]) == 0


def test_the_gradient_lowers_the_mass_of_a_loaded_expert():
    logits, ids = jnp.zeros((8, 4)), jnp.full((8, 1), 2)
    gradient = jax.jit(jax.grad(load_balance_loss))(logits, ids)
    expected = 4 * 0.25 * (np.eye(4)[2] - 0.25) / 8
    np.testing.assert_allclose(gradient, np.tile(expected, (8, 1)), rtol=1e-5)


def test_router_z_loss():
    logits = np.random.default_rng(0).standard_normal((3, 5, 4))
    expected = (np.log(np.exp(logits).sum(-1)) ** 2).mean()
    np.testing.assert_allclose(router_z_loss(jnp.float32(logits)), expected, rtol=1e-6)
    large = jax.grad(router_z_loss)(jnp.asarray([[300.0, 0.0]]))
    np.testing.assert_allclose(large, [[600.0, 0.0]])


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="load_balance_loss: `score` must be"):
        load_balance_loss(jnp.ones((2, 3)), jnp.ones((2, 1), int), score="tanh")
