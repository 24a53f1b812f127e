"""indexer_scores: weighted products behind a relu, hidden keys, blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import indexer_scores
from jaxkern.primitives.attention import query_blocks
from jaxkern.testing.checks import bf16, case, f32, i32

CASES = [
    case(
        "everything",
        query=f32(2, 4, 2, 3),
        key=f32(2, 6, 3),
        weights=f32(2, 4, 2),
        kv_lengths=i32(2, low=2, high=7),
        q_offset=i32(2, low=0, high=4),
        causal=True,
        block_size=2,
        pool="mean",
    ),
    case(
        "plain",
        query=f32(2, 2, 2, 3),
        key=f32(2, 4, 3),
        weights=f32(2, 2, 2),
        causal=True,
    ),
    case(
        "deepseek_v3_2_decode",
        full=True,
        query=bf16(2, 1, 64, 128),
        key=bf16(2, 300, 128),
        weights=f32(2, 1, 64),
        kv_lengths=i32(2, low=1, high=301),
    ),
]


def draw(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def operands(t=3, s=7):
    return draw(2, t, 4, 5), draw(2, s, 5, seed=1), draw(2, t, 4, seed=2)


def by_hand(query, key, weights, lengths, offsets):
    """`[b, t, s]` in float64, one pair after the other."""
    query, key, weights = (np.float64(x) for x in (query, key, weights))
    b, t, _, _ = query.shape
    scores = np.full((b, t, key.shape[1]), -np.inf)
    for i, row in np.ndindex(b, t):
        for j in range(min(lengths[i], offsets[i] + row + 1)):
            products = np.maximum(query[i, row] @ key[i, j], 0)
            scores[i, row, j] = weights[i, row] @ products
    return scores


def test_scores_and_blocks_match_the_formula():
    lengths, offsets = np.array([7, 4]), np.array([2, 1])
    expected = by_hand(*operands(), lengths, offsets)
    seen = expected != -np.inf
    assert seen.any(-1).all() and not seen.all()

    def found(**options):
        options |= dict(kv_lengths=lengths, q_offset=offsets, causal=True)
        return indexer_scores(*operands(), **options)

    np.testing.assert_allclose(found(), expected, rtol=2e-5, atol=1e-6)
    blocks = [expected[:, :, c : c + 3] for c in (0, 3, 6)]
    best = np.stack([x.max(-1) for x in blocks], -1)
    np.testing.assert_allclose(found(block_size=3), best, rtol=2e-5, atol=1e-6)
    with np.errstate(invalid="ignore"):
        means = [
            np.where(x > -np.inf, x, 0).sum(-1) / (x > -np.inf).sum(-1) for x in blocks
        ]
    mean = np.where(best == -np.inf, -np.inf, np.stack(means, -1))
    mine = found(block_size=3, pool="mean")
    np.testing.assert_allclose(mine, mean, rtol=2e-5, atol=1e-6)


def test_blocks_of_query_rows_change_nothing(monkeypatch):
    def scores():
        f = lambda *x: indexer_scores(*x, causal=True, block_size=2)  # noqa: E731
        return jax.jit(f)(*operands(t=5))

    whole = scores()
    of_two_rows = 2 * 4 * 2 * 4 * 7
    monkeypatch.setattr(query_blocks, "MAX_SCORES_BYTES", of_two_rows)
    np.testing.assert_allclose(scores(), whole, rtol=1e-5, atol=1e-6)


def test_nan_behind_the_lengths_has_no_influence():
    query, key, weights = operands()
    lengths = jnp.array([7, 0])
    behind = (jnp.arange(7) >= lengths[:, None])[:, :, None]

    @jax.jit
    def results(fill):
        def loss(*x):
            y = indexer_scores(*x, kv_lengths=lengths)
            return jnp.sum(jnp.where(jnp.isfinite(y), jnp.sin(y), 0)), y

        given = query, jnp.where(behind, fill, key), weights
        return jax.grad(loss, (0, 1, 2), has_aux=True)(*given)

    clean, dirty = results(0.0), results(jnp.nan)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert (clean[1][1] == -jnp.inf).all()


def test_every_error_says_what_to_do():
    query, key, weights = operands()
    with pytest.raises(ValueError, match=r"indexer_scores: block_size is 0"):
        indexer_scores(query, key, weights, block_size=0)
    with pytest.raises(ValueError, match=r"`pool` must be one of .*, got 'sum'"):
        indexer_scores(query, key, weights, pool="sum")
    with pytest.raises(TypeError, match=r"indexer_scores: `key` must have 3 dims"):
        indexer_scores(query, key[:, :, None], weights)
    with pytest.raises(TypeError, match=r"dim `n` is 4 in `query` but 3 in `weights`"):
        indexer_scores(query, key, weights[..., :3])
    with pytest.raises(ValueError, match="ambiguous"):
        indexer_scores(query, key, weights, kv_lengths=jnp.ones(2, int), causal=True)
