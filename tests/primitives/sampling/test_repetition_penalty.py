"""Repetition penalty against a NumPy loop; padding, infinities, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.primitives.sampling.repetition_penalty import apply_repetition_penalty
from jaxkern.testing.checks import bf16, boolean, case, f32, i32, uniform

CASES = [
    case(
        "smollm2_context",
        logits=bf16(2, 49152),
        token_ids=i32(2, 512, high=49152),
        penalty=uniform(2, low=1, high=2),
        mask=None,
    ),
    case(
        "odd",
        logits=f32(3, 5, 13),
        token_ids=i32(3, 5, 7, low=-2, high=15),
        penalty=uniform(3, 5, low=0.5, high=2),
        mask=boolean(3, 5, 7),
    ),
    case(
        "even",
        logits=f32(8, 16),
        token_ids=i32(8, 4, high=16),
        penalty=uniform(8, low=1, high=2),
        mask=None,
    ),
    case(
        "row",
        logits=f32(5),
        token_ids=i32(3, high=5),
        penalty=uniform(low=1, high=2),
        mask=None,
    ),
]


def oracle(logits, token_ids, penalty, mask):
    y = logits.copy()
    for row, ids, p, m in zip(y, token_ids, penalty, mask, strict=True):
        for i in {i for i, kept in zip(ids, m, strict=True) if kept}:
            if 0 <= i < len(row):
                row[i] = row[i] / p if row[i] > 0 else row[i] * p
    return y


@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients_match_the_loop(masked):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((4, 11))
    ids = rng.integers(-3, 14, (4, 9)).astype(np.int32)
    penalty = rng.uniform(0.5, 2, 4).astype(np.float32)
    mask = rng.random((4, 9)) < 0.6 if masked else np.ones((4, 9), bool)

    def f(logits, penalty):
        given = jnp.asarray(mask) if masked else None
        return apply_repetition_penalty(logits, jnp.asarray(ids), penalty, mask=given)

    y, vjp = jax.vjp(f, jnp.asarray(logits, jnp.float32), jnp.asarray(penalty))
    expected = oracle(logits, ids, penalty, mask)
    np.testing.assert_allclose(y, expected, 1e-6)
    dlogits, dpenalty = vjp(jnp.ones((4, 11)))
    np.testing.assert_allclose(dlogits, expected / logits, 1e-5)
    h = 1e-3
    up, down = (oracle(logits, ids, penalty + s * h, mask) for s in (1, -1))
    np.testing.assert_allclose(dpenalty, (up - down).sum(-1) / (2 * h), 1e-3, 1e-4)


def test_a_token_counts_once():
    y = apply_repetition_penalty(jnp.asarray([2.0, -2.0]), jnp.asarray([0, 0, 0]), 2.0)
    np.testing.assert_array_equal(y, [1, -2])


def test_infinite_logits_stay_and_have_finite_gradients():
    logits = jnp.asarray([[-jnp.inf, jnp.inf, jnp.nan, 1.0]])

    def f(logits, penalty):
        y = apply_repetition_penalty(logits, jnp.asarray([[0, 1, 2, 3]]), penalty)
        return y

    y, vjp = jax.vjp(f, logits, jnp.asarray([2.0]))
    np.testing.assert_array_equal(y, [[-np.inf, np.inf, np.nan, 0.5]])
    dlogits, dpenalty = vjp(jnp.ones((1, 4)))
    np.testing.assert_array_equal(dlogits, [[1, 1, 1, 0.5]])
    np.testing.assert_array_equal(dpenalty, [-0.25])


def test_narrow_ids_over_a_wide_vocabulary():
    ids = jnp.asarray([127, -1], jnp.int8)
    y = apply_repetition_penalty(jnp.ones(300), ids, 2.0)
    assert y[127] == 0.5 and y.sum() == 299.5


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="`penalty` must be positive, got 0"):
        apply_repetition_penalty(jnp.ones(3), jnp.zeros(1, jnp.int32), 0)
