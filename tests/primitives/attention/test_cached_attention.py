"""Every cache, however a text is cut into calls, gives the attention of the whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    IntCodec,
    TurboQuantCodec,
    attention,
    cached_attention,
    empty_kv_cache,
    empty_paged_kv_cache,
    quantize_straight_through,
    release_pages,
)

B, N, K, H = 2, 4, 2, 4
TEXT = 13
CACHES = {  # and the window of its queries
    "linear": (empty_kv_cache(B, 16, K, H, dtype=jnp.float32), None),
    "linear_window": (empty_kv_cache(B, TEXT, K, H, dtype=jnp.float32), 4),
    "ring": (empty_kv_cache(B, 5, K, H, dtype=jnp.float32, ring=True), None),
    "ring_window": (empty_kv_cache(B, 5, K, H, dtype=jnp.float32, ring=True), 3),
    "turboquant_window": (empty_kv_cache(B, 16, K, H, dtype=TurboQuantCodec(4)), 4),
    "int8_ring": (empty_kv_cache(B, 5, K, H, dtype=IntCodec(8), ring=True), 3),
    "paged": (empty_paged_kv_cache(B, 5, 8, 4, K, H, dtype=jnp.float32), None),
    "paged_window": (empty_paged_kv_cache(B, 5, 8, 4, K, H, dtype=jnp.float32), 4),
}


def text(length=TEXT, b=B):
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.standard_normal((b, length, heads, H)), jnp.float32)
        for heads in (N, K, K)
    ]


def window_of(name):
    cache, window = CACHES[name]
    ring = getattr(cache, "ring", False)
    return cache.slots if ring and window is None else window


def expected_of(name, qkv):
    """Attention of the whole text, keys and values as the cache keeps them."""
    q, *kv = qkv
    cache, _ = CACHES[name]
    if getattr(cache, "quantized", False):
        kv = [quantize_straight_through(x, cache.keys.codec) for x in kv]
    return attention(q, *kv, causal=True, window=window_of(name))


CHUNKS = [7, 1, 1, 2, 2]  # the first is longer than the ring
FEWER = {"turboquant_window": [7, 2, 2, 2], "int8_ring": [7, 2, 2, 2]}


@pytest.mark.parametrize(
    "name, cut",
    [*((name, FEWER.get(name, CHUNKS)) for name in CACHES), ("ring", [1] * TEXT)],
)
def test_a_text_in_any_pieces(name, cut):
    qkv = text()
    cache, window = CACHES[name]
    step = jax.jit(functools.partial(cached_attention, window=window))
    expected = expected_of(name, qkv)
    outs, start = [], 0
    for t in cut:
        out, cache = step(*(x[:, start : start + t] for x in qkv), cache)
        outs.append(out)
        start += t
    np.testing.assert_allclose(jnp.concatenate(outs, 1), expected, atol=2e-6)
    np.testing.assert_array_equal(cache.lengths, [TEXT] * B)


@pytest.mark.parametrize("name", ["linear", "ring", "int8_ring", "paged"])
def test_each_sequence_at_its_own_pace(name):
    """Padded calls of 3 tokens, of which 0 to 3 count."""
    qkv = text()
    cache, window = CACHES[name]
    expected = expected_of(name, qkv)
    step = jax.jit(functools.partial(cached_attention, window=window))
    done = np.zeros(B, int)
    for counts in ([3, 1], [0, 3], [2, 2], [3, 0], [3, 3]):
        at = np.minimum(done[:, None] + np.arange(3), TEXT - 1)
        new = [jnp.stack([x[b, at[b]] for b in range(B)]) for x in qkv]
        out, cache = step(*new, cache, jnp.array(counts))
        for b, count in enumerate(counts):
            here = expected[b, done[b] : done[b] + count]
            np.testing.assert_allclose(out[b, :count], here, atol=2e-6)
        done += counts
    np.testing.assert_array_equal(cache.lengths, done)


@pytest.mark.parametrize("name", ["ring_window", "paged"])
def test_gradients_through_the_cache(name):
    """The gradient of a text read in two pieces is that of the whole."""
    cache, window = CACHES[name]
    qkv = text(6)

    def in_two(*qkv):
        first, after = cached_attention(*(x[:, :4] for x in qkv), cache, window=window)
        second, _ = cached_attention(*(x[:, 4:] for x in qkv), after, window=window)
        return jnp.concatenate([first, second], 1)

    whole = functools.partial(attention, causal=True, window=window_of(name))
    actual, expected = (
        jax.jit(jax.grad(lambda *x, f=f: jnp.sum(jnp.sin(f(*x))), (0, 1, 2)))(*qkv)
        for f in (in_two, whole)
    )
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, atol=3e-6)


@pytest.mark.parametrize("kind", ["linear", "table", "pages"])
def test_a_full_cache_keeps_its_first_tokens(kind):
    """8 tokens fit; later queries see these 8, and not their own key."""
    q, k, v = (x[:1] for x in text())
    cache = {
        "linear": empty_kv_cache(1, 8, K, H, dtype=jnp.float32),
        "table": empty_paged_kv_cache(1, 2, 9, 4, K, H, dtype=jnp.float32),
        "pages": empty_paged_kv_cache(1, 9, 2, 4, K, H, dtype=jnp.float32),
    }[kind]
    expected = attention(q, k[:, :8], v[:, :8], causal=True, q_offset=0)
    step = jax.jit(cached_attention)
    for part in (slice(0, 7), slice(7, 10), slice(10, 13)):
        out, cache = step(q[:, part], k[:, part], v[:, part], cache)
        np.testing.assert_allclose(out, expected[:, part], atol=2e-6)
    np.testing.assert_array_equal(cache.lengths, [13])


def test_no_sequence_sees_what_another_left_in_a_page():
    """Sequence 1 finds no page, loses its tokens, and gets the freed page too late."""
    q, k, v = text()
    step = jax.jit(cached_attention)
    cache = empty_paged_kv_cache(B, 2, 1, 4, K, H, dtype=jnp.float32)
    out, cache = step(q[:, :2], k[:, :2], v[:, :2], cache)
    np.testing.assert_array_equal(cache.block_tables, [[0, -1], [-1, -1]])
    assert out[0].any() and not out[1].any()
    cache = release_pages(cache, jnp.array([True, False]))
    np.testing.assert_array_equal(cache.lengths, [0, 2])
    counts = jnp.array([0, 2])
    out, cache = step(q[:, 2:4], k[:, 2:4], v[:, 2:4], cache, counts)
    np.testing.assert_array_equal(cache.block_tables, [[-1, -1], [-1, -1]])
    assert not out[1].any()
    # its next page begins at token 4: from there on it sees its own tokens
    out, cache = step(q[:, 4:6], k[:, 4:6], v[:, 4:6], cache, counts)
    np.testing.assert_array_equal(cache.block_tables, [[-1, -1], [-1, 0]])
    expected = attention(q[1:, 4:6], k[1:, 4:6], v[1:, 4:6], causal=True)
    np.testing.assert_allclose(out[1:], expected, atol=2e-6)


def test_sequences_share_the_pages_of_a_prompt():
    q, k, v = text(b=1)
    cache = empty_paged_kv_cache(2, 4, 4, 4, K, H, dtype=jnp.float32)
    first = [jnp.concatenate([x[:, :8], 0 * x[:, :8]]) for x in (q, k, v)]
    _, cache = cached_attention(*first, cache, jnp.array([8, 0]))
    tables = cache.block_tables.at[1].set(cache.block_tables[0])
    cache = type(cache)(cache.key_pages, cache.value_pages, tables, jnp.array([8, 8]))
    rest = [jnp.concatenate([x[:, 8:10], x[:, 10:12]]) for x in (q, k, v)]
    out, cache = cached_attention(*rest, cache)
    np.testing.assert_array_equal(cache.block_tables, [[0, 1, 2, -1], [0, 1, 3, -1]])
    for b, part in enumerate((slice(8, 10), slice(10, 12))):
        whole = [jnp.concatenate([x[:, :8], x[:, part]], 1) for x in (k, v)]
        expected = attention(q[:, part], *whole, causal=True)
        np.testing.assert_allclose(out[b : b + 1], expected, atol=2e-6)


def test_softcap_sinks_and_scale_reach_every_cache():
    q, k, v = text(5)
    options = dict(softcap=1.5, scale=0.7, sinks=jnp.array([0.0, 1.0, -1.0, 2.0]))
    for name in ("linear", "ring_window", "paged"):
        cache, window = CACHES[name]
        step = functools.partial(cached_attention, window=window, **options)
        out, _ = jax.jit(step)(q, k, v, cache)
        expected = attention(q, k, v, causal=True, window=window, **options)
        np.testing.assert_allclose(out, expected, atol=2e-6)
        pair = None if window is None else (window - 1, 2)  # causal: nothing behind
        del options["scale"]
        step = functools.partial(cached_attention, window=pair, **options)
        traced, _ = jax.jit(lambda *x, f=step: f(*x[:4], scale=x[4]))(
            q, k, v, cache, 0.7
        )
        np.testing.assert_allclose(traced, expected, atol=2e-6)
        options["scale"] = 0.7


def test_caches_go_through_scan_and_vmap():
    """A cache of each layer, stacked: the pytree is all that JAX needs."""
    q, k, v = text(3)
    cache, _ = CACHES["ring"]
    layers = jax.tree.map(lambda x: jnp.stack([x, x]), cache)

    def layer(x, cache):
        out, cache = cached_attention(x, k, v, cache)
        return out, cache

    out, after = jax.lax.scan(layer, q, layers)
    first = attention(q, k, v, causal=True)
    expected = attention(first, k, v, causal=True)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    assert after.keys.shape == (2, *cache.keys.shape) and after.ring
    mapped, _ = jax.vmap(lambda cache: cached_attention(q, k, v, cache))(layers)
    np.testing.assert_allclose(mapped, jnp.stack([first, first]), atol=2e-6)


def test_a_window_must_fit_the_ring():
    q, k, v = text(2)
    with pytest.raises(ValueError, match=r"window is 6 but the ring has 5 slots"):
        cached_attention(q, k, v, CACHES["ring"][0], window=6)


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "name",
    ["ring", pytest.param("linear", marks=FULL), pytest.param("paged", marks=FULL)],
)
def test_what_no_token_has_written_has_no_influence(name):
    """Nor have tokens that do not count, be all of it NaN; gradients too."""
    q, k, v = text(7)
    cache, _ = CACHES[name]
    used = jax.tree.map(
        lambda x: x + jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else x, cache
    )
    padding = jnp.arange(7)[:, None, None] >= 4
    padded = [jnp.where(padding, jnp.nan, x) for x in (q, k, v)]
    counts = jnp.array([4, 4])

    def first_four(cache, q, k, v):
        return cached_attention(q, k, v, cache, counts)[0][:, :4]

    expected = first_four(cache, q, k, v)
    np.testing.assert_allclose(first_four(used, *padded), expected, atol=2e-6)
    dq = jax.grad(lambda q: first_four(used, q, *padded[1:]).sum())(q)
    assert jnp.isfinite(dq[:, :4]).all()
