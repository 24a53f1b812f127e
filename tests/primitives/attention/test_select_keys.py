"""select_keys: the best of what a row sees, -1 for the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import indexer_scores, select_keys


@pytest.mark.parametrize("k", [0, 3, 7, 10])
def test_the_best_of_what_is_visible_and_minus_one_behind(k):
    rng = np.random.default_rng(0)
    scores = rng.permutation(14).reshape(2, 7).astype(np.float32)
    visible = np.arange(7) < np.array([[5], [2]])
    hidden = jnp.where(visible, scores, -jnp.inf)
    found = jax.jit(select_keys, static_argnums=1)(hidden, k)
    assert found.dtype == jnp.int32
    for row, seen, mine in zip(scores, visible, found, strict=True):
        best = np.argsort(-row[seen])[:k]
        np.testing.assert_array_equal(mine, [*best, *[-1] * (k - len(best))])


def test_a_block_that_is_always_read_and_one_that_is_always_hidden():
    query, key = jnp.ones((1, 1, 1, 2)), jnp.arange(12.0).reshape(1, 6, 2)
    lengths = jnp.array([3])
    scores = indexer_scores(
        query, key, jnp.ones((1, 1, 1)), kv_lengths=lengths, block_size=2
    )
    np.testing.assert_array_equal(select_keys(scores, 2), [[[1, 0]]])
    first = scores.at[..., 0].set(jnp.inf)
    np.testing.assert_array_equal(select_keys(first, 3), [[[0, 1, -1]]])


def test_a_choice_has_no_gradient():
    slope = jax.grad(lambda x: jnp.sum(x * select_keys(x, 3)))(jnp.arange(3.0))
    np.testing.assert_array_equal(slope, [2, 1, 0])


def test_errors():
    with pytest.raises(ValueError, match=r"select_keys: `k` must be 0 or more, got -1"):
        select_keys(jnp.ones(3), -1)
    with pytest.raises(TypeError, match=r"select_keys: `scores` must have dims"):
        select_keys(jnp.ones(()), 1)
    with pytest.raises(TypeError, match=r"select_keys: `scores` must have a dtype"):
        select_keys(jnp.ones(3, int), 1)
