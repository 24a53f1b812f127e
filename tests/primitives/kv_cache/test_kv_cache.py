"""append_kv_cache is every mode of mlx-native's kv_cache_copy; page allocation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    KVCache,
    allocate_pages,
    append_kv_cache,
    empty_kv_cache,
    update_kv_cache,
)

CAPACITY, HEADS, D = 5, 2, 3


def numbers(*shape, start=0):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + start
    return x


def origin_copy(cache, src, write_pos, ring=False, last=False):
    """`[Hkv, cap, D]` with `[T, Hkv, D]` from write_pos on, one token at a time."""
    cache = np.array(cache)
    first = max(len(src) - cache.shape[1], 0) if last else 0
    for i in range(first, len(src)):
        slot = (write_pos + i) % cache.shape[1] if ring else write_pos + i
        cache[:, slot] = src[i]
    return cache


def heads_first(cache):
    """`[1, s, k, h]` as the origin's `[Hkv, cap, D]`."""
    return np.asarray(cache[0]).swapaxes(0, 1)


def cache_with(length, ring, dtype=jnp.float32):
    keys = jnp.asarray(numbers(1, CAPACITY, HEADS, D, start=1000), dtype)
    return KVCache(keys, keys + 500, jnp.full(1, length, jnp.int32), ring)


def appended(cache, src):
    """Keys `src` and values `src + 50`: the "dual" mode, both in one call."""
    key = jnp.asarray(src)[None]
    return jax.jit(append_kv_cache)(cache, key, key + 50)


@pytest.mark.parametrize(
    "mode, write_pos, tokens",
    [
        ("linear", 1, 3),
        ("linear", 4, 1),  # "batch": one token of all heads
        ("ring", 3, 4),
        ("ring", 12, 1),
        ("ring", 7, 12),  # more than the ring holds: the last 5 stay
    ],
)
def test_every_mode_of_kv_cache_copy(mode, write_pos, tokens):
    ring = mode == "ring"
    cache, src = cache_with(write_pos, ring), numbers(tokens, HEADS, D)
    after = appended(cache, src)
    for name, add in (("keys", 0), ("values", 50)):
        before = heads_first(getattr(cache, name))
        expected = origin_copy(before, src + add, write_pos, ring, last=ring)
        np.testing.assert_array_equal(heads_first(getattr(after, name)), expected)
    np.testing.assert_array_equal(after.lengths, [write_pos + tokens])
    assert after.ring == ring


def test_seq_mode_with_a_source_offset():
    """The tokens from src_tok_offset on, at seq_pos_start: a slice of the source."""
    src = numbers(6, HEADS, D)
    after = appended(cache_with(8, True), src[2:5])
    expected = origin_copy(
        heads_first(cache_with(8, True).keys), src[2:5], 8, ring=True
    )
    np.testing.assert_array_equal(heads_first(after.keys), expected)


@pytest.mark.parametrize(
    "source, target",
    [
        (jnp.float32, jnp.float32),
        (jnp.float32, jnp.float16),
        (jnp.bfloat16, jnp.float32),
        (jnp.float16, jnp.float16),
    ],
)
def test_dtypes_are_converted_by_one_rounding(source, target):
    src = jnp.asarray(1 / (1 + numbers(1, 2, HEADS, D)), source)
    cache = update_kv_cache(jnp.zeros((1, CAPACITY, HEADS, D), target), src, 1)
    assert cache.dtype == target
    np.testing.assert_array_equal(cache[:, 1:3], src.astype(target))


def test_an_empty_cache():
    cache = empty_kv_cache(2, 4, 3, 8, value_dim=5, ring=True)
    assert cache.keys.shape == (2, 4, 3, 8) and cache.values.shape == (2, 4, 3, 5)
    assert cache.keys.dtype == cache.values.dtype == jnp.bfloat16
    assert not cache.lengths.any() and cache.ring and cache.slots == 4
    leaves, tree = jax.tree.flatten(cache)
    assert len(leaves) == 3  # `ring` is static
    assert jax.tree.unflatten(tree, leaves) == cache or tree.num_leaves == 3


def test_the_adjoint_of_append_reads_the_slots():
    cache, src = cache_with(3, True), numbers(1, 4, HEADS, D)

    def keys(old, new):
        old = KVCache(old, cache.values, cache.lengths, True)
        return append_kv_cache(old, new, new).keys

    _, vjp = jax.vjp(keys, cache.keys, jnp.asarray(src))
    dout = jnp.asarray(numbers(1, CAPACITY, HEADS, D, start=1))
    dold, dnew = vjp(dout)
    np.testing.assert_array_equal(dnew, dout[:, jnp.array([3, 4, 0, 1])])
    np.testing.assert_array_equal(dold, dout.at[:, jnp.array([3, 4, 0, 1])].set(0))


@pytest.mark.parametrize(
    "before, lengths, after, expected",
    [
        # the lowest free numbers, sequence by sequence
        ([[-1] * 3] * 2, [0, 0], [5, 1], [[0, 1, -1], [2, -1, -1]]),
        ([[1, -1, -1], [3, -1, -1]], [3, 4], [5, 6], [[1, 0, -1], [3, 2, -1]]),
        # none is left: 4 pages
        ([[-1] * 3] * 2, [0, 0], [12, 12], [[0, 1, 2], [3, -1, -1]]),
        # more than the table has, and nothing new
        ([[2, 0, 3], [-1] * 3], [12, 0], [16, 0], [[2, 0, 3], [-1] * 3]),
        # a page never begins in its middle
        ([[-1] * 3] * 2, [2, 4], [4, 5], [[-1] * 3, [-1, 0, -1]]),
        # a shared page is taken once
        ([[1, -1, -1], [1, -1, -1]], [4, 4], [5, 5], [[1, 0, -1], [1, 2, -1]]),
    ],
)
def test_allocation(before, lengths, after, expected):
    tables = allocate_pages(
        *(jnp.array(x, jnp.int32) for x in (before, lengths, after)),
        num_pages=4,
        page_size=4,
    )
    np.testing.assert_array_equal(tables, expected)
    assert tables.dtype == jnp.int32
