"""sparse_attention is attention behind a mask of what the indices name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    attention,
    indexer_scores,
    latent_attention,
    merge_partials,
    select_keys,
    sparse_attention,
)
from jaxkern.primitives.attention.sparse_attention import sparse_attention_p
from jaxkern.testing.checks import bf16, case, f32, i32


def numbers(*shape, blocks, hidden=0):
    """Numbers of `blocks` and `hidden` times -1, none twice in a row."""

    def draw(rng):
        every = np.array([*range(blocks), *[-1] * hidden], np.int32)
        rows = np.broadcast_to(every, (*shape[:-1], every.size))
        return rng.permuted(rows, axis=-1)[..., : shape[-1]]

    return draw


CASES = [
    case(  # as many rows as the cache has: masked
        "everything",
        query=f32(2, 2, 4, 2),
        key=f32(2, 5, 2, 2),
        value=f32(2, 5, 2, 3),
        indices=numbers(2, 2, 2, 2, blocks=3, hidden=1),
        kv_lengths=i32(2, low=2, high=6),
        q_offset=i32(2, low=0, high=4),
        block_size=2,
        scale=0.6,
        causal=True,
    ),
    case(
        "gathered",
        query=f32(2, 2, 4, 2),
        key=f32(2, 9, 2, 2),
        value=f32(2, 9, 2, 3),
        indices=numbers(2, 2, 2, 2, blocks=5, hidden=1),
        kv_lengths=i32(2, low=4, high=10),
        q_offset=i32(2, low=1, high=8),
        block_size=2,
        scale=0.6,
        causal=True,
    ),
    case(
        "one_list_for_all_heads",
        query=f32(2, 1, 2, 2),
        key=f32(2, 6, 2, 2),
        indices=numbers(2, 1, 1, 4, blocks=6, hidden=2),
        value_dim=1,
        scale=0.6,
    ),
    case(
        "latent",
        query=f32(1, 2, 2, 4),
        key=f32(1, 3, 1, 4),
        indices=numbers(1, 2, 1, 2, blocks=3),
        value_dim=3,
        scale=0.5,
    ),
    case(
        "deepseek_v3_2_decode",
        full=True,
        query=bf16(2, 1, 128, 576),
        key=bf16(2, 400, 1, 576),
        indices=numbers(2, 1, 1, 128, blocks=400, hidden=20),
        kv_lengths=i32(2, low=100, high=401),
        value_dim=512,
        scale=192**-0.5,
    ),
    case(
        "nsa_decode",
        full=True,
        query=bf16(2, 1, 64, 128),
        key=bf16(2, 2000, 4, 128),
        value=bf16(2, 2000, 4, 128),
        indices=numbers(2, 1, 4, 8, blocks=32, hidden=2),
        kv_lengths=i32(2, low=1000, high=2001),
        block_size=64,
        scale=128**-0.5,
    ),
]


def draw(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def operands(t, s, k=2, g=2):
    return draw(2, t, k * g, 5), draw(2, s, k, 5, seed=1), draw(2, s, k, 3, seed=2)


def mask_by_hand(indices, s, block_size, group):
    """`[b, k*group, t, s]`, one index after the other."""
    b, t, k, _ = indices.shape
    mask = np.zeros((b, k, t, s), bool)
    for i, row, head in np.ndindex(b, t, k):
        for number in indices[i, row, head]:
            if number >= 0:
                start = int(number) * block_size
                mask[i, head, row, start : start + block_size] = True
    return mask.repeat(group, 1)


MASKED = pytest.param(4, marks=pytest.mark.full)  # keys, fewer than are selected
FORMS = {  # block size, selected, keys: rows are gathered where they are few
    "masked tokens": (1, 5, 8),
    "gathered tokens": (1, 3, 8),
    "masked blocks": (3, 3, 14),
    "gathered blocks": (3, 2, 14),
}


@pytest.mark.parametrize(
    "form, lists",
    [
        pytest.param("masked tokens", 1, marks=pytest.mark.full),
        ("gathered tokens", 2),
        ("masked blocks", 2),
        ("gathered blocks", 1),
    ],
)
def test_is_attention_behind_a_mask_with_its_gradients(form, lists):
    block_size, selected, s = FORMS[form]
    qkv, lengths = operands(2, s), np.array([s - 1, s - 3])
    blocks = -(-s // block_size)
    indices = numbers(2, 2, lists, selected, blocks=blocks, hidden=2)(
        np.random.default_rng(1)
    )
    options: dict = dict(
        kv_lengths=lengths, q_offset=lengths - 2, causal=True, return_lse=True
    )

    def whole(*qkv):
        mask = mask_by_hand(indices, s, block_size, 4 // lists if lists > 1 else 1)
        return attention(*qkv, mask=mask, scale=0.7, **options)

    def ours(*qkv):
        return sparse_attention(
            *qkv, indices, block_size=block_size, scale=0.7, **options
        )

    def results(f):
        y, pull = jax.vjp(f, *qkv)
        slopes = pull(jax.tree.map(jnp.cos, y))
        return y, slopes, jax.jvp(f, qkv, qkv)[1]

    found, expected = (jax.jit(lambda f=f: results(f))() for f in (ours, whole))
    for y, e in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(y, e, atol=3e-6)


@pytest.mark.parametrize("s", [MASKED, 40])
def test_a_number_that_comes_twice_counts_once_and_one_outside_not_at_all(s):
    qkv = operands(1, s)
    again = [2, 0, 2, 2, -1, 0, s, 2**31 - 1, -(2**31)]
    lists = jnp.array([[again]] * 2), jnp.array([[[0, 2, *[-1] * 7]]] * 2)
    f = jax.jit(lambda *x: sparse_attention(*x, return_lse=True))
    for x, e in zip(*(f(*qkv, x) for x in lists), strict=True):
        np.testing.assert_allclose(x, e, atol=1e-6)


def with_slopes(qkv, lists, **options):
    def both(*qkv):
        f = lambda *x: sparse_attention(*x, lists, return_lse=True, **options)  # noqa: E731
        (out, lse), pull = jax.vjp(f, *qkv)
        return out, lse, *pull((jnp.ones_like(out), jnp.ones_like(lse)))

    return jax.jit(both)(*qkv)


@pytest.mark.parametrize("s", [MASKED, 40])
def test_nothing_selected_gives_zeros_and_no_gradient(s):
    out, lse, *slopes = with_slopes(operands(2, s), jnp.full((2, 2, 2, 3), -1))
    assert (lse == -jnp.inf).all()
    assert not any(x.any() for x in (out, *slopes))


@pytest.mark.parametrize("s", [MASKED, 40])
def test_nan_behind_the_lengths_has_no_influence(s):
    q, k, v = operands(1, s)
    lengths, lists = jnp.array([3, 0]), jnp.array([[[0, 2, 3, 1]]] * 2)
    behind = (jnp.arange(s) >= lengths[:, None])[:, :, None, None]
    clean, dirty = (
        with_slopes(
            (q, *(jnp.where(behind, fill, x) for x in (k, v))),
            lists,
            kv_lengths=lengths,
        )
        for fill in (0.0, jnp.nan)
    )
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


def test_all_keys_of_a_latent_cache_are_latent_attention():
    q, latent = draw(2, 2, 3, 6), draw(2, 5, 6, seed=1)
    every = jnp.broadcast_to(jnp.arange(5), (2, 2, 5))

    def ours(q, latent):
        key = latent[:, :, None]
        return sparse_attention(q, key, None, every, value_dim=4, scale=0.3)

    whole = lambda *x: latent_attention(*x, value_dim=4, scale=0.3)  # noqa: E731

    def results(f):
        y, pull = jax.vjp(f, q, latent)
        return y, pull(jnp.cos(y))

    found, expected = (jax.jit(lambda f=f: results(f))() for f in (ours, whole))
    for x, e in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(x, e, atol=2e-6)


def test_parts_that_share_no_keys_merge():
    q, k, v = operands(1, 12)
    lists = jnp.array([[[3, 1]], [[0, 2]]]), jnp.array([[[0, 2]], [[3, 1]]])
    parts = [sparse_attention(q, k, v, x, block_size=3, return_lse=True) for x in lists]
    out, _ = merge_partials(*map(jnp.stack, zip(*parts, strict=True)))
    np.testing.assert_allclose(out, attention(q, k, v), atol=1e-6)


def test_a_step_of_decoding_reads_what_the_indexer_chooses():
    """Enough keys for all: the step is plain attention. Fewer: the best of them."""
    q, k, v = operands(1, 30)
    index_q, index_k, weights = draw(2, 1, 3, 4), draw(2, 30, 4, seed=1), jnp.ones(3)
    lengths = jnp.array([21, 5])

    @jax.jit
    def step(q, k, v, index_k):
        scores = indexer_scores(
            index_q,
            index_k,
            jnp.broadcast_to(weights, (2, 1, 3)),
            kv_lengths=lengths,
        )
        chosen = select_keys(scores, 8)
        out = sparse_attention(q, k, v, chosen, kv_lengths=lengths, unique_indices=True)
        return out, scores, chosen

    out, scores, chosen = step(q, k, v, index_k)
    expected = attention(q, k, v, kv_lengths=lengths)
    np.testing.assert_allclose(out[1], expected[1], atol=1e-6)
    assert not np.allclose(out[0], expected[0], atol=1e-3)
    assert (np.asarray(chosen[1, 0, 5:]) == -1).all()
    best = np.argsort(-np.asarray(scores[0, 0]))[:8]
    np.testing.assert_array_equal(np.sort(chosen[0, 0]), np.sort(best))
    few = attention(q[:1], k[:1, best], v[:1, best])
    np.testing.assert_allclose(out[:1], few, atol=1e-6)


def test_every_error_says_what_to_do():
    q, k, v = operands(2, 6)
    lists = jnp.zeros((2, 2, 1, 3), int)
    with pytest.raises(ValueError, match=r"sparse_attention: block_size is 0"):
        sparse_attention(q, k, v, lists, block_size=0)
    with pytest.raises(ValueError, match=r"value_dim is 2\. It is 1 to 5"):
        sparse_attention(q, k, v, lists, value_dim=2)
    with pytest.raises(ValueError, match=r"value_dim is 6\. It is 1 to 5"):
        sparse_attention(q, k, None, lists, value_dim=6)
    with pytest.raises(ValueError, match="ambiguous"):
        sparse_attention(q, k, v, lists, causal=True, kv_lengths=jnp.ones(2, int))
    with pytest.raises(TypeError, match=r"`indices` must have 4 dims, got shape"):
        sparse_attention(q, k, v, lists[0, 0])
    with pytest.raises(TypeError, match=r"`indices` must have a dtype of kind Int"):
        sparse_attention(q, k, v, lists.astype(float))
    with pytest.raises(TypeError, match=r"dim `k` is 2 in `key` but 3 in `indices`"):
        sparse_attention(q, k, v, jnp.zeros((2, 2, 3, 3), int))
    with pytest.raises(TypeError, match=r"sparse_attention: dim `s` is 6 in `key`"):
        sparse_attention_p(
            q,
            k,
            v[:, 1:],
            lists,
            None,
            None,
            block_size=1,
            value_dim=None,
            scale=1.0,
            causal=False,
            unique_indices=False,
        )
