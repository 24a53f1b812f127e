"""qk_norm_rope_cache: the three calls that it stands for, in place, and gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    Float8Codec,
    IntCodec,
    NormRope,
    QuantizedVectors,
    TurboQuantCodec,
    apply_rope,
    qk_norm_rope,
    qk_norm_rope_cache,
    qk_norm_rope_paged_cache,
    qk_norm_rope_quantized_cache,
    update_kv_cache,
    update_quantized_kv_cache,
)
from jaxkern.testing.checks import bf16, case, f32, i32, u8


def heads(b, t, n, k, h, r, hv=None, spec=f32):
    """The operands that have no cache in them, and the distance of a pair."""
    return dict(
        query=spec(b, t, n, h),
        key=spec(b, t, k, h),
        value=spec(b, t, k, hv or h),
        query_weight=spec(h),
        key_weight=spec(h),
        cos=f32(b, t, r),
        sin=f32(b, t, r),
        pair_offset=r,
    )


def float_caches(b, s, k, h, hv, spec=f32):
    return dict(key_cache=spec(b, s, k, h), value_cache=spec(b, s, k, hv))


LLAMA3 = dict(query_weight=None, key_weight=None, eps=None)
OPTIONS = dict(ring=False, eps=1e-6, offset=0.0, pairing="neox")
CASES = {
    "qk_norm_rope_cache": [
        case(
            "plain",
            **heads(2, 3, 4, 2, 8, r=3, hv=4),
            **float_caches(2, 5, 2, 8, 4),
            positions=i32(2, low=-1, high=5),
            offset=1.0,
        ),
        case(
            "ring",
            full=True,
            **heads(2, 7, 2, 2, 4, r=2) | LLAMA3,
            **float_caches(2, 5, 2, 4, 4, bf16),
            positions=i32(2, high=30),
            new_lengths=i32(2, high=8),
            pairing="interleaved",
            ring=True,
        ),
        case(
            "qwen3_8b_decode",
            full=True,
            **heads(4, 1, 32, 8, 128, r=64, spec=bf16),
            **float_caches(4, 64, 8, 128, 128, bf16),
            positions=i32(4, high=64),
        ),
    ],
    "qk_norm_rope_quantized_cache": [
        case(
            "int8_and_turboquant",
            **heads(1, 2, 4, 2, 16, r=8) | LLAMA3,
            key_codes=u8(1, 4, 2, 16),
            key_scales=f32(1, 4, 2, 1),
            value_codes=u8(1, 4, 2, 8),
            value_scales=f32(1, 4, 2, 1),
            positions=i32(1, high=3),
            key_codec=IntCodec(8),
            value_codec=TurboQuantCodec(4),
            ring=False,
            offset=0.0,
            pairing="neox",
        ),
        case(
            "ring",
            full=True,
            **heads(2, 5, 3, 1, 16, r=4, spec=bf16),
            key_codes=u8(2, 4, 1, 8),
            key_scales=f32(2, 4, 1, 2),
            value_codes=u8(2, 4, 1, 16),
            value_scales=f32(2, 4, 1, 1),
            positions=i32(2, high=30),
            new_lengths=i32(2, high=6),
            key_codec=IntCodec(4, group=8),
            value_codec=Float8Codec(),
            **OPTIONS | dict(ring=True),
        ),
    ],
}


def draw(b, t, n, k, h, dtype=jnp.float32):
    """(query, key, value), weights and tables."""
    rng = np.random.default_rng(0)
    shapes = (b, t, n, h), (b, t, k, h), (b, t, k, h), (h,), (h,)
    *new, a, c = (jnp.asarray(rng.standard_normal(s), dtype) for s in shapes)
    angle = rng.standard_normal((b, t, h // 2))
    return new, (a, c), (jnp.float32(np.cos(angle)), jnp.float32(np.sin(angle)))


def same(actual, expected):
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_array_equal(a, e)


def empty(codec, shape, dtype=jnp.float32):
    if codec is None:
        return jnp.full(shape, 7, dtype)
    cache = QuantizedVectors.zeros(shape, codec)
    return jax.tree.map(lambda x: jnp.full_like(x, 7), cache)


CODECS = [IntCodec(8), IntCodec(4, group=8), Float8Codec(), TurboQuantCodec(3)]
INSIDE, ACROSS = ((2, 6), None, False), ((-2, 9), (3, 1), False)
RING = ((3, 40), (5, 2), True)


@pytest.mark.parametrize(
    "codec, positions, new_lengths, ring",
    [
        pytest.param(None, *ACROSS, id="linear"),
        pytest.param(TurboQuantCodec(4), *RING, id="quantised ring"),
        *(
            pytest.param(codec, *place, marks=pytest.mark.full)
            for codec in (None, *CODECS)
            for place in (INSIDE, ACROSS, RING)
        ),
    ],
)
def test_it_is_norm_rotation_and_update(codec, positions, new_lengths, ring):
    """Tokens before, inside, across and behind the 7 slots; the others stay."""
    new, weights, tables = draw(2, 5, 4, 2, 16)
    caches = [empty(codec, (2, 7, 2, 16)) for _ in range(2)]
    slots = (
        jnp.array(positions),
        None if new_lengths is None else jnp.array(new_lengths),
    )
    update, fused = (
        (update_kv_cache, qk_norm_rope_cache)
        if codec is None
        else (update_quantized_kv_cache, qk_norm_rope_quantized_cache)
    )
    write = functools.partial(update, ring=ring)

    @jax.jit
    def normed(query, key, value, weights, caches):
        y = qk_norm_rope(query, key, *weights, *tables, eps=0.1)
        expected = y[0], write(caches[0], y[1], *slots), write(caches[1], value, *slots)
        new = query, key, value, weights, tables
        how = NormRope(eps=0.1)
        return fused(*new, *caches, *slots, ring=ring, norm_rope=how), expected

    @jax.jit
    def turned(query, key, value, caches):
        y = [apply_rope(x, *tables) for x in (query, key)]
        expected = y[0], write(caches[0], y[1], *slots), write(caches[1], value, *slots)
        new = query, key, value, (None, None), tables
        how = NormRope(eps=None)
        return fused(*new, *caches, *slots, ring=ring, norm_rope=how), expected

    same(*normed(*new, weights, caches))
    same(*turned(*new, caches))


def test_values_may_have_a_norm():
    """Of their own eps and without weight, rounded once: to float16, and to codes."""
    (query, key, value), weights, tables = draw(2, 3, 4, 2, 16)
    value = 3 * value
    normed = value / jnp.sqrt((value**2).mean(-1, keepdims=True) + 0.5)
    slots = jnp.array([2, 6]), jnp.array([3, 1])
    once, twice = NormRope(eps=0.1), NormRope(eps=0.1, value_eps=0.5)

    @jax.jit
    def both(query, key, value, normed):
        found = []
        for codec, op in (
            (None, qk_norm_rope_cache),
            (IntCodec(8), qk_norm_rope_quantized_cache),
        ):
            cache = empty(codec, (2, 7, 2, 16), jnp.float16)
            last = weights, tables, cache, cache, *slots
            found.append(op(query, key, value, *last, norm_rope=twice))
            found.append(op(query, key, normed, *last, norm_rope=once))
        return found

    found = both(query, key, value, normed)
    for with_eps, expected in zip(found[::2], found[1::2], strict=True):
        for a, e in zip(*map(jax.tree.leaves, (with_eps, expected)), strict=True):
            atol = 1 if a.dtype == jnp.uint8 else 2e-3
            np.testing.assert_allclose(np.float32(a), np.float32(e), atol=atol)


def test_a_key_is_rounded_once():
    """In bfloat16 a key is rounded, then quantised; here only the latter."""
    new, weights, tables = draw(1, 1, 1, 1, 64, jnp.bfloat16)
    cache = QuantizedVectors.zeros((1, 1, 1, 64), IntCodec(8))

    @jax.jit
    def found(new, weights):
        write = qk_norm_rope_quantized_cache
        return write(*new, weights, tables, cache, cache, 0)[1]

    @jax.jit
    def twice(new, weights):
        rounded = qk_norm_rope(*new[:2], *weights, *tables)[1]
        return update_quantized_kv_cache(cache, rounded, 0)

    exact = found(*jax.tree.map(jnp.float32, (new, weights)))
    same(found(new, weights), exact)
    assert (twice(new, weights).codes != exact.codes).any()


def test_gradients_follow_the_tokens():
    """A written row takes its gradient from the cache: to key and value, not to it."""
    (query, key, value), weights, tables = draw(2, 2, 2, 1, 4)
    caches = jnp.zeros((2, 4, 1, 4)), jnp.zeros((2, 4, 1, 4))
    dout = [jax.random.normal(jax.random.key(9), x.shape) for x in (query, *caches)]

    def fused(query, key, value, *caches):
        return qk_norm_rope_cache(
            query, key, value, weights, tables, *caches, jnp.array([3, 1])
        )

    def of_queries_and_keys(query, key):
        return qk_norm_rope(query, key, *weights, *tables)

    @jax.jit
    def pulled(dout, *operands):
        return jax.vjp(fused, *operands)[1](tuple(dout))

    dquery, dkey, dvalue, dkeys, dvalues = pulled(dout, query, key, value, *caches)
    written = np.zeros((2, 4, 1, 1))
    written[0, 3] = written[1, 1:3] = 1
    same((dkeys, dvalues), [np.where(written, 0, d) for d in dout[1:]])
    dy_key, dy_value = (
        jnp.stack([jnp.stack([d[0, 3], jnp.zeros((1, 4))]), d[1, 1:3]])
        for d in dout[1:]
    )
    same(dvalue, dy_value)
    expected = jax.jit(lambda *dy: jax.vjp(of_queries_and_keys, query, key)[1](dy))(
        dout[0], dy_key
    )
    for a, e in zip((dquery, dkey), expected, strict=True):
        np.testing.assert_allclose(a, e, atol=1e-6)


@pytest.mark.parametrize("codec", [None, TurboQuantCodec(4)], ids=str)
def test_donated_caches_are_written_in_place(codec):
    """A jitted loop of steps has no copy and no second cache."""
    (query, key, value), weights, tables = draw(1, 1, 4, 2, 64)
    fused = qk_norm_rope_quantized_cache if codec else qk_norm_rope_cache

    @functools.partial(jax.jit, donate_argnums=0)
    def decode(caches, positions):
        def step(i, caches):
            return fused(
                query + i, key, value, weights, tables, *caches, positions + i
            )[1:]

        return jax.lax.fori_loop(0, 5, step, caches)

    shape = (1, 4096, 2, 64)
    caches = jax.eval_shape(lambda: (empty(codec, shape), empty(codec, shape)))
    compiled = decode.lower(caches, jax.ShapeDtypeStruct((1,), jnp.int32)).compile()
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == held
    assert memory.temp_size_in_bytes < 2**16
    assert not re.search(r"\[1,4096,2,\d+\]\S* copy\(", compiled.as_text())


def test_weights_and_tables_are_operands_like_the_others():
    """In pairs they are differentiable and mapped, for what they are one by one."""
    (query, key, value), weights, tables = draw(2, 2, 2, 1, 4)
    weights, tables = (
        [jnp.stack([x, 2 * x]) for x in pair] for pair in (weights, tables)
    )
    caches = jnp.zeros((2, 4, 1, 4)), jnp.zeros((2, 4, 1, 4))

    def loss(weights, tables):
        y = qk_norm_rope_cache(
            query, key, value, tuple(weights), tuple(tables), *caches, jnp.array([3, 1])
        )
        return jnp.sum(jnp.sin(y[0])) + jnp.sum(jnp.sin(y[1]))

    def apart(weights, tables):
        rotated = qk_norm_rope(query, key, *weights, *tables)
        keys = update_kv_cache(caches[0], rotated[1], jnp.array([3, 1]))
        return jnp.sum(jnp.sin(rotated[0])) + jnp.sum(jnp.sin(keys))

    found, expected = (
        jax.jit(jax.vmap(jax.grad(f, (0, 1))))(weights, tables) for f in (loss, apart)
    )
    for a, e in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.abs(e).min(axis=-1).max() > 0
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


def test_every_error_says_what_to_do():
    new, *pairs = draw(1, 1, 4, 2, 8)
    cache, codes = jnp.zeros((1, 4, 2, 8)), empty(IntCodec(8), (1, 4, 2, 8))
    f = functools.partial(qk_norm_rope_cache, *new)
    g = functools.partial(qk_norm_rope_quantized_cache, *new)
    paged = functools.partial(qk_norm_rope_paged_cache, *new, *pairs, cache, cache)
    slots, bare = jnp.zeros((1, 1), int), NormRope(eps=None)
    with pytest.raises(TypeError, match=r"`value_cache` must be QuantizedVectors, got"):
        g(*pairs, codes, cache, 0)
    with pytest.raises(ValueError, match=r"eps=None leaves out the norms.* Pass eps"):
        f(*pairs, cache, cache, 0, norm_rope=bare)
    with pytest.raises(
        TypeError, match=r"dim `s` is 4 in `key_cache` but 3 in `value_"
    ):
        f(*pairs, cache, cache[:, :3], 0)
    with pytest.raises(ValueError, match=r"_cache: 4 pairs at distance 5 do not fit"):
        f(*pairs, cache, cache, 0, norm_rope=NormRope(pair_offset=5))
    other = empty(IntCodec(8), (1, 4, 2, 16))
    with pytest.raises(TypeError, match=r"quantized_cache: `new` has 8 dims and 1 sca"):
        g(*pairs, other, other, 0)
    with pytest.raises(ValueError, match=r"qk_norm_rope_paged_cache: eps=None leaves"):
        paged(slots, norm_rope=bare)
    with pytest.raises(ValueError, match=r"paged_cache: `value_eps` .* is 0.5.* leave"):
        paged(slots, norm_rope=NormRope(value_eps=0.5))
