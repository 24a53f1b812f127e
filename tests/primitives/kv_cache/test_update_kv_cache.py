"""update_kv_cache: which token ends in which slot, in place, rings and attention."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import attention, ring_positions, update_kv_cache
from jaxkern.testing.checks import bf16, case, f32, i32


def shapes(b, t, s, k, h, low=0, high=None, spec=f32):
    high = s if high is None else high
    return dict(
        cache=spec(b, s, k, h),
        new=f32(b, t, k, h),
        positions=i32(b, low=low, high=high),
    )


CASES = [
    case("plain", **shapes(2, 3, 8, 2, 4)),
    case(
        "ring",
        **shapes(2, 3, 8, 2, 4, high=30),
        new_lengths=i32(2, low=1, high=4),
        ring=True,
    ),
    case("outside", **shapes(3, 3, 5, 1, 2, low=-4, high=8)),
    case("sharded", **shapes(8, 8, 16, 8, 4)),
    case("ring_of_one", **shapes(1, 5, 1, 1, 3, high=9), ring=True),
    case("more_tokens_than_slots", **shapes(2, 7, 5, 1, 2, low=-3, high=5)),
    case("no_tokens", **shapes(2, 0, 5, 1, 2)),
    case("no_slots", **shapes(2, 3, 0, 1, 2, high=1)),
    case("no_sequences", **shapes(0, 3, 4, 1, 2)),
    case("smollm2_135m_decode", **shapes(1, 1, 512, 3, 64)),
    case("llama3_8b_decode", **shapes(4, 1, 256, 8, 128, spec=bf16)),
    case("gemma2_ring_prefill", **shapes(1, 48, 32, 4, 256, spec=bf16), ring=True),
]


def formula(cache, new, positions, ring, lengths=None):
    """One token at a time; later tokens overwrite earlier ones."""
    out = np.array(cache)
    for b, position in enumerate(positions):
        length = None if lengths is None else max(lengths[b], 0)
        for i, token in enumerate(new[b][:length]):
            slot = (position + i) % out.shape[1] if ring else position + i
            if 0 <= slot < out.shape[1]:
                out[b, slot] = token
    return out


def numbers(b, n, start):
    """`[b, n, 1, 1]` of distinct numbers."""
    x = np.arange(b * n, dtype=np.float32) + start
    return x.reshape(b, n, 1, 1)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("t", [0, 1, 2, 4, 5, 6, 11, 16])
def test_every_position(t, ring):
    """Each sequence starts elsewhere, before, inside and behind the 5 slots."""
    positions = np.arange(-13, 14)
    b = len(positions)
    cache, new = numbers(b, 5, 1000), numbers(b, t, 0)
    f = functools.partial(update_kv_cache, ring=ring)
    out = f(jnp.asarray(cache), jnp.asarray(new), jnp.asarray(positions))
    np.testing.assert_array_equal(out, formula(cache, new, positions, ring))
    for i in (0, 13, 26):  # one sequence takes another path
        one = f(*(jnp.asarray(x[i : i + 1]) for x in (cache, new, positions)))
        np.testing.assert_array_equal(one, out[i : i + 1])


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("t", [3, 5, 12])
def test_every_length_of_new_tokens(t, ring):
    """Padding is not written, so a ring keeps what it held; also beyond 0 and t."""
    lengths = np.arange(-1, t + 2)
    b = len(lengths)
    cache, new = numbers(b, 5, 1000), numbers(b, t, 0)
    for position in (0, 3, 9):
        positions = np.full(b, position)
        out = update_kv_cache(
            *(jnp.asarray(x) for x in (cache, new, positions, lengths)), ring=ring
        )
        np.testing.assert_array_equal(
            out, formula(cache, new, positions, ring, lengths)
        )


def test_tokens_behind_the_end_are_dropped_not_shifted():
    cache, new = jnp.zeros((1, 4, 1, 1)), jnp.asarray(numbers(1, 3, 1))
    out = update_kv_cache(cache, new, jnp.array([2]))
    np.testing.assert_array_equal(out.ravel(), [0, 0, 1, 2])
    shifted = jax.lax.dynamic_update_slice(cache, new, (0, 2, 0, 0))
    np.testing.assert_array_equal(shifted.ravel(), [0, 1, 2, 3])


def test_dtype_is_that_of_the_cache():
    cache = jnp.zeros((1, 2, 1, 1), jnp.bfloat16)
    out = update_kv_cache(cache, jnp.full((1, 1, 1, 1), 1 / 3), jnp.array([1]))
    assert out.dtype == jnp.bfloat16
    assert out[0, 1, 0, 0] == jnp.bfloat16(1 / 3)


def test_one_position_for_all():
    cache, new = jnp.zeros((3, 4, 1, 2)), jnp.ones((3, 2, 1, 2))
    out = update_kv_cache(cache, new, 1)
    np.testing.assert_array_equal(out[..., 0, 0], [[0, 1, 1, 0]] * 3)


@pytest.mark.parametrize("ring", [False, True])
def test_gradients_follow_the_tokens(ring):
    cache, new = jnp.asarray(numbers(2, 4, 10)), jnp.asarray(numbers(2, 3, 0))
    weights = jnp.asarray(numbers(2, 4, 1))

    def loss(cache, new):
        out = update_kv_cache(cache, new, jnp.array([3, 1]), ring=ring)
        return jnp.sum(weights * out)

    dcache, dnew = jax.grad(loss, (0, 1))(cache, new)
    w = weights[..., 0, 0]
    kept = [[[0, 1, 1, 0], [1, 0, 0, 0]], [[0, 0, 1, 0], [1, 0, 0, 0]]][ring]
    read = [[[w[0, 3], 0, 0], w[1, 1:]], [[w[0, 3], *w[0, :2]], w[1, 1:]]][ring]
    kept[0] = [1, 1, 1, 0] if not ring else kept[0]
    np.testing.assert_array_equal(dcache[..., 0, 0], w * np.array(kept))
    np.testing.assert_array_equal(dnew[..., 0, 0], np.array(read))


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("b", [1, 3])
def test_a_donated_cache_is_written_in_place(b, ring):
    """A jitted loop of updates has no copy and no second cache."""

    @functools.partial(jax.jit, donate_argnums=0)
    def decode(cache, new, positions):
        def step(i, cache):
            return update_kv_cache(cache, new * i, positions + i, ring=ring)

        return jax.lax.fori_loop(0, 5, step, cache)

    cache = jax.ShapeDtypeStruct((b, 4096, 2, 64), jnp.float32)
    new = jax.ShapeDtypeStruct((b, 1, 2, 64), jnp.float32)
    compiled = decode.lower(cache, new, jax.ShapeDtypeStruct((b,), jnp.int32)).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == b * 4096 * 2 * 64 * 4
    assert memory.temp_size_in_bytes < 2**16
    whole = rf"f32\[{b},4096,2,64\]\S* copy\("
    assert not re.search(whole, compiled.as_text())


def test_ring_positions():
    positions = ring_positions(jnp.array([0, 2, 4, 7]), 4)
    expected = [[-4, -3, -2, -1], [0, 1, -2, -1], [0, 1, 2, 3], [4, 5, 6, 3]]
    np.testing.assert_array_equal(positions, expected)
    assert ring_positions(3, 0).shape == (0,)


def text(n, seed=0):
    rng = np.random.default_rng(seed)
    return [
        jnp.asarray(rng.standard_normal((2, n, heads, 4)), jnp.float32)
        for heads in (4, 2, 2)
    ]


def test_a_full_ring_is_a_sliding_window():
    """Token by token over 5 slots = causal attention with a window of 5."""
    q, k, v = text(17)
    expected = attention(q, k, v, causal=True, window=5)
    keys, values = jnp.zeros((2, 5, 2, 4)), jnp.zeros((2, 5, 2, 4))
    for p in range(17):
        keys = update_kv_cache(keys, k[:, p : p + 1], p, ring=True)
        values = update_kv_cache(values, v[:, p : p + 1], p, ring=True)
        out = attention(q[:, p : p + 1], keys, values, kv_lengths=min(p + 1, 5))
        np.testing.assert_allclose(out[:, 0], expected[:, p], atol=1e-6)


@pytest.mark.parametrize("window", [5, 3])
def test_chunks_over_a_ring(window):
    """Chunks of 4 over a ring of 5: the mask from ring_positions, then the update."""
    q, k, v = text(16)
    expected = attention(q, k, v, causal=True, window=window)
    keys, values = jnp.zeros((2, 5, 2, 4)), jnp.zeros((2, 5, 2, 4))
    for start in range(0, 16, 4):
        chunk = slice(start, start + 4)
        query_at = start + jnp.arange(4)
        key_at = jnp.concatenate([ring_positions(start, 5), query_at])
        distance = query_at[:, None] - key_at
        mask = (key_at >= 0) & (distance >= 0) & (distance < window)
        out = attention(
            q[:, chunk],
            jnp.concatenate([keys, k[:, chunk]], axis=1),
            jnp.concatenate([values, v[:, chunk]], axis=1),
            mask=mask,
        )
        np.testing.assert_allclose(out, expected[:, chunk], atol=1e-6)
        keys = update_kv_cache(keys, k[:, chunk], start, ring=True)
        values = update_kv_cache(values, v[:, chunk], start, ring=True)


@pytest.mark.parametrize("lengths", [5, np.int64(5), np.full(2, 5), np.uint8([5])])
def test_ring_positions_are_int32_under_x64_too(lengths):
    """The tests run without x64, where an integer has 32 bits anyway."""
    with jax.enable_x64(True):
        found = ring_positions(lengths, 4)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(
        found[..., :], np.broadcast_to([4, 1, 2, 3], found.shape)
    )
