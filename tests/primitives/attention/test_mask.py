"""Masks and tile maps against their definitions, and what attention makes of them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    attention,
    block_mask,
    make_block_mask,
    make_mask,
    padding_mask,
    segment_mask,
    softmax,
)


def definition(t, s, causal, window, offset):
    """Pair by pair, in the words of the docs."""
    see = np.zeros((t, s), bool)
    for i, j in itertools.product(range(t), range(s)):
        p = i + offset
        see[i, j] = (not causal or j <= p) and (window is None or p - window < j)
    return see


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("offset", [None, 0, -3, 9])
def test_every_pair(causal, window, offset):
    options = dict(causal=causal, window=window)
    expected = definition(4, 7, causal, window, 3 if offset is None else offset)
    mask = make_mask(4, 7, **options, q_offset=offset)
    np.testing.assert_array_equal(mask, expected)
    bias = make_mask(4, 7, **options, q_offset=offset, dtype=jnp.bfloat16)
    assert bias.dtype == jnp.bfloat16
    np.testing.assert_array_equal(bias, np.where(expected, 0, -np.inf))


def test_offsets_per_sequence_are_traced():
    offsets = jnp.array([0, 3])
    mask = jax.jit(lambda o: make_mask(4, 7, causal=True, window=2, q_offset=o))(
        offsets
    )
    assert mask.shape == (2, 1, 4, 7)
    for m, offset in zip(mask, [0, 3], strict=True):
        np.testing.assert_array_equal(m[0], definition(4, 7, True, 2, offset))


def test_a_window_counts_its_keys_and_mlx_has_one_more():
    """D6: `sdpa_sliding(W)` shows abs - W <= k <= abs; here that is window=W + 1."""
    seen = make_mask(10, 10, causal=True, window=4).sum(-1)
    np.testing.assert_array_equal(seen, [1, 2, 3, *[4] * 7])
    q, k = np.arange(10)[:, None], np.arange(10)
    mlx = (q - 4 <= k) & (k <= q)
    np.testing.assert_array_equal(make_mask(10, 10, causal=True, window=5), mlx)


def test_segments_and_lengths():
    q_ids, kv_ids = jnp.array([[0, 0, 1], [2, 1, 1]]), jnp.array([[0, 1, 9], [1, 1, 2]])
    mask = segment_mask(q_ids, kv_ids)
    expected = np.array(
        [[[1, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 0, 1], *[[1, 1, 0]] * 2]]
    )
    np.testing.assert_array_equal(mask[:, 0], expected)
    lengths = padding_mask(jnp.array([2, 0]), 3)
    assert lengths.shape == (2, 1, 1, 3)
    np.testing.assert_array_equal(lengths[:, 0, 0], [[1, 1, 0], [0, 0, 0]])
    both = segment_mask(q_ids, kv_ids, dtype=jnp.float32) + padding_mask(
        jnp.array([2, 0]), 3, dtype=jnp.float32
    )
    np.testing.assert_array_equal(both, np.where(mask & lengths, 0, -np.inf))


def qkv(t, s, n=2, k=1, h=4, b=2):
    rng = np.random.default_rng(0)
    shapes = (b, t, n, h), (b, s, k, h), (b, s, k, h)
    return [jnp.asarray(rng.standard_normal(x), jnp.float32) for x in shapes]


@pytest.mark.parametrize("additive", [False, True])
def test_attention_takes_a_mask_for_its_options(additive):
    q, k, v = qkv(4, 6)
    ids = jnp.array([[0, 0, 1, 1], [0, 1, 1, 1]]), jnp.array([[0] * 3 + [1] * 3] * 2)
    lengths, offset = jnp.array([6, 4]), jnp.array([2, 1])
    dtype = jnp.float32 if additive else jnp.bool_
    masks = (
        make_mask(4, 6, causal=True, window=3, q_offset=offset, dtype=dtype),
        segment_mask(*ids, dtype=dtype),
        padding_mask(lengths, 6, dtype=dtype),
    )
    if additive:
        given = dict(bias=sum(masks))
    else:
        given = dict(mask=masks[0] & masks[1] & masks[2])
    options = dict(
        causal=True, window=3, q_offset=offset, segment_ids=ids, kv_lengths=lengths
    )
    expected = attention(q, k, v, return_lse=True, **options)
    actual = attention(q, k, v, return_lse=True, **given)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


# Tiles.


def tiles_by_loop(see, block_q, block_kv):
    t, s = see.shape
    rows = [see[i : i + block_q] for i in range(0, t, block_q)]
    tiles = [[r[:, j : j + block_kv] for j in range(0, s, block_kv)] for r in rows]
    return [[2 if x.all() else 1 if x.any() else 0 for x in row] for row in tiles]


@pytest.mark.parametrize("blocks", [(2, 3), (4, 2), (16, 16)])
@pytest.mark.parametrize("causal, window", [(True, None), (True, 3), (False, 4)])
@pytest.mark.parametrize("offset", [None, -4, 30])
def test_tiles_by_position_equal_those_of_the_mask(blocks, causal, window, offset):
    options = dict(causal=causal, window=window, q_offset=offset)
    sizes = dict(block_q=blocks[0], block_kv=blocks[1])
    mask = make_mask(9, 11, **options)
    expected = tiles_by_loop(np.asarray(mask), *blocks)
    tiles = block_mask(mask, **sizes)
    assert tiles.dtype == jnp.uint8
    np.testing.assert_array_equal(tiles, expected)
    np.testing.assert_array_equal(make_block_mask(9, 11, **options, **sizes), expected)
    additive = make_mask(9, 11, **options, dtype=jnp.float32)
    np.testing.assert_array_equal(block_mask(additive, **sizes), expected)


def test_tiles_of_any_mask_and_leading_dims():
    mask = np.random.default_rng(0).random((2, 3, 8, 10)) < 0.5
    tiles = block_mask(jnp.asarray(mask), block_q=2, block_kv=2)
    assert tiles.shape == (2, 3, 4, 5)
    assert set(np.unique(tiles)) == {0, 1, 2}
    for at in np.ndindex(2, 3):
        np.testing.assert_array_equal(tiles[at], tiles_by_loop(mask[at], 2, 2))
    per_sequence = make_block_mask(
        8, 10, block_q=2, block_kv=2, causal=True, q_offset=jnp.array([0, 2])
    )
    assert per_sequence.shape == (2, 1, 4, 5)
    one = make_block_mask(8, 10, block_q=2, block_kv=2, causal=True, q_offset=0)
    np.testing.assert_array_equal(per_sequence[0, 0], one)


def test_a_bias_is_read_where_it_is_not_zero():
    """Finite biases count; -1e30 and less hide; a NaN must reach the scores."""
    bias = jnp.array([[0.0, 0.5], [-1e30, -jnp.inf], [0.0, -0.0], [jnp.nan, 0.0]])
    tiles = block_mask(bias, block_q=1, block_kv=2)
    np.testing.assert_array_equal(tiles[:, 0], [1, 0, 2, 1])


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_no_queries_or_no_keys(shape):
    sizes = dict(block_q=2, block_kv=3)
    expected = np.zeros([-(-n // b) for n, b in zip(shape, (2, 3), strict=True)])
    mask = make_mask(*shape, causal=True)
    np.testing.assert_array_equal(block_mask(mask, **sizes), expected)
    np.testing.assert_array_equal(
        make_block_mask(*shape, causal=True, **sizes), expected
    )


def tiled_attention(q, k, v, mask, tiles, block_q, block_kv):
    """Online softmax by tiles; without the map it reads every tile and its mask."""
    out = np.zeros((q.shape[0], v.shape[1]), np.float32)
    for a, i in enumerate(range(0, len(q), block_q)):
        rows = slice(i, i + block_q)
        top = np.full((len(q[rows]), 1), -1e30, np.float32)
        total, acc = np.zeros_like(top), np.zeros((len(top), v.shape[1]), np.float32)
        for b, j in enumerate(range(0, len(k), block_kv)):
            columns = slice(j, j + block_kv)
            kind = None if tiles is None else tiles[a, b]
            if kind == 0:
                continue
            s = q[rows] @ k[columns].T
            if kind != 2:
                s = np.where(mask[rows, columns], s, np.float32(-np.inf))
            new_top = np.maximum(top, s.max(-1, keepdims=True))
            p, scale = np.exp(s - new_top), np.exp(top - new_top)
            total, acc = (
                total * scale + p.sum(-1, keepdims=True),
                acc * scale + p @ v[columns],
            )
            top = new_top
        out[rows] = acc / np.where(total == 0, 1, total)
    return out


@pytest.mark.parametrize("blocks", [(2, 3), (4, 2)])
def test_skipped_and_full_tiles_change_no_bit(blocks):
    q, k, v = (np.asarray(x[0, :, 0]) for x in qkv(11, 13))
    mask = make_mask(11, 13, causal=True, window=6, q_offset=1)
    tiles = block_mask(mask, block_q=blocks[0], block_kv=blocks[1])
    assert set(np.unique(tiles)) == {0, 1, 2}
    mask, tiles = np.asarray(mask), np.asarray(tiles)
    every = tiled_attention(q, k, v, mask, None, *blocks)
    some = tiled_attention(q, k, v, mask, tiles, *blocks)
    np.testing.assert_array_equal(some, every)
    whole = attention(*(x[None, :, None] for x in (q, k, v)), mask=mask, scale=1.0)
    np.testing.assert_allclose(some, whole[0, :, 0], atol=1e-6)


# mlx-native's scale_mask_softmax: softmax(scale * x + mask) with an additive mask.


def test_scale_mask_softmax():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 3, 4, 6)), jnp.float32)  # [b n t s]
    mask = make_mask(4, 6, causal=True, q_offset=-1, dtype=jnp.bfloat16)
    weights = np.exp(0.3 * np.asarray(x, np.float64)) * np.isfinite(
        np.asarray(mask, np.float64)
    )
    total = weights.sum(-1, keepdims=True)
    assert not total[..., 0, 0].any()  # the first query sees nothing: D22
    expected = weights / np.where(total == 0, 1, total)

    def additive(x):
        return softmax(0.3 * x + mask.astype(x.dtype))

    def masked(x):
        return softmax(x, mask == 0, scale=0.3)

    dy = jnp.asarray(rng.standard_normal(x.shape), jnp.float32)
    dx = 0.3 * expected * (dy - (dy * expected).sum(-1, keepdims=True))
    for f in (additive, masked):
        y, vjp = jax.vjp(f, x)
        np.testing.assert_allclose(y, expected, atol=1e-6)
        np.testing.assert_allclose(vjp(dy)[0], dx, atol=1e-6)


def test_errors():
    with pytest.raises(ValueError, match=r"make_mask: window is 0. It counts keys"):
        make_mask(2, 2, window=0)
    with pytest.raises(ValueError, match=r"make_block_mask: window is -1."):
        make_block_mask(2, 2, block_q=1, block_kv=1, window=-1)
