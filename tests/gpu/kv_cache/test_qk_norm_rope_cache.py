"""The kernel that writes rotated keys, values and their codes to a cache, on a GPU."""

import functools

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
    attention,
    backend,
    explain,
    qk_norm_rope_cache,
    qk_norm_rope_paged_cache,
    qk_norm_rope_quantized_cache,
)
from jaxkern.primitives.turboquant.vector_codec import planes, unpack
from tests.gpu.truth import EPSILON, on_a_gpu, poison, relative_errors

pytestmark = on_a_gpu
HEADS = [  # n, k, h, hv, pairs, options
    (32, 8, 128, 128, 64, {}),
    (14, 2, 64, 64, 32, {"eps": None}),
    (40, 8, 128, 128, 64, {"pairing": "interleaved", "eps": None}),
    (16, 2, 256, 256, 32, {"offset": 1.0}),
    (6, 3, 80, 96, 16, {"pairing": "interleaved"}),
    (5, 1, 96, 40, 24, {"pair_offset": 48}),
    (3, 3, 13, 7, 5, {}),
    (8, 1, 256, 256, 128, {"value_eps": 1e-6}),
    (8, 1, 512, 512, 256, {"value_eps": 0.5}),
    (1, 1, 2, 1, 1, {}),
    (2, 1, 2048, 512, 1024, {}),
]
PLACES = {  # b, t, s, positions, new_lengths, ring
    "decode": (4, 1, 9, (0, 8, 9, -1), None, False),
    "one sequence": (1, 1, 300, (123,), None, False),
    "prefill": (2, 37, 50, (-5, 20), None, False),
    "lengths": (3, 4, 6, (0, 1, 5), (4, 0, 9), False),
    "ring": (3, 4, 6, (5, 29, -3), (4, 0, 3), True),
    "more than the ring": (2, 9, 4, (3, 40), (9, 6), True),
}


def draw(b, t, n, k, h, hv, pairs, dtype, options):
    """query, key, value, the pair of weights or of None, and that of tables."""
    rng = np.random.default_rng(0)
    shapes = (b, t, n, h), (b, t, k, h), (b, t, k, hv), (h,), (h,)
    *new, a, c = (jnp.asarray(rng.standard_normal(s), dtype) for s in shapes)
    weights = (None, None) if options.get("eps", 0) is None else (a, c)
    angle = rng.standard_normal((2, b, t, pairs))
    tables = jnp.float32(np.cos(angle[0])), jnp.float32(np.sin(angle[1]))
    return *new, weights, tables


def places(name):
    b, t, s, positions, new_lengths, ring = PLACES[name]
    lengths = None if new_lengths is None else jnp.array(new_lengths)
    return b, t, s, (jnp.array(positions), lengths), {"ring": ring}


def full(shape, codec=None, dtype="float32"):
    """A cache in which every byte counts: nothing but the new tokens may change."""
    if codec is None:
        rng = np.random.default_rng(1)
        return jnp.asarray(rng.standard_normal(shape), dtype)
    codes = QuantizedVectors.zeros(shape, codec)
    return jax.tree.map(
        lambda x: (jnp.arange(x.size) % 251).reshape(x.shape).astype(x.dtype), codes
    )


def by_kernel(f, *operands):
    """With caches that are not donated: XLA must copy them, then write the copy."""
    poison(*(x for x in jax.tree.leaves(operands) if x.dtype == jnp.float32))
    with backend("triton", strict=True):
        return jax.jit(lambda *a: f(*a))(*operands)


def in_float64(f, *operands):
    cpu = jax.devices("cpu")[0]
    with jax.enable_x64(True), backend("xla"), jax.default_device(cpu):
        wide = jax.tree.map(
            lambda x: np.asarray(
                x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else None
            ),
            operands,
        )
        return jax.jit(lambda *a: f(*a))(*wide)


def check_floats(f, new, caches, slots):
    found = by_kernel(f, *new, *caches, *slots)
    truth = in_float64(f, *new, *caches, *slots)
    limit = 2 * max(EPSILON[x.dtype.name] for x in (new[0], *caches))
    for error in relative_errors(found, truth, 1e-2):
        assert error < limit
    for old, after, exact in zip(caches, found[1:], truth[1:], strict=True):
        assert after.dtype == old.dtype
        kept = np.asarray(exact) == np.asarray(old, np.float64)
        assert kept.any() or old.shape[1] <= 9
        np.testing.assert_array_equal(np.asarray(after)[kept], np.asarray(old)[kept])


@pytest.mark.parametrize(
    "dtype, cache_dtype",
    [
        ("bfloat16", "bfloat16"),
        ("float32", "float16"),
        ("float16", "float32"),
        ("float32", "float32"),
    ],
)
@pytest.mark.parametrize("n, k, h, hv, pairs, options", HEADS)
def test_heads_and_dtypes(n, k, h, hv, pairs, options, dtype, cache_dtype):
    b, t, s, slots, _ = places("lengths")
    new = draw(b, t, n, k, h, hv, pairs, dtype, options)
    caches = [full((b, s, k, d), dtype=cache_dtype) for d in (h, hv)]
    f = functools.partial(qk_norm_rope_cache, norm_rope=NormRope(**options))
    check_floats(f, new, caches, slots)


@pytest.mark.parametrize("name", PLACES)
def test_every_place(name):
    b, t, s, slots, where = places(name)
    new = draw(b, t, 8, 2, 64, 32, 32, "bfloat16", {})
    caches = [full((b, s, 2, d), dtype="bfloat16") for d in (64, 32)]
    check_floats(functools.partial(qk_norm_rope_cache, **where), new, caches, slots)


@pytest.mark.parametrize("t", [1, 5])
def test_pages(t):
    new = draw(3, t, 8, 2, 64, 64, 32, "bfloat16", {})
    pages = [full((7, 16, 2, 64), dtype="bfloat16") for _ in range(2)]
    slots = np.random.default_rng(2).permutation(7 * 16)[: 3 * t].reshape(3, t)
    slots[0, 0], slots[-1, -1] = -1, 7 * 16
    check_floats(qk_norm_rope_paged_cache, new, pages, (jnp.asarray(slots),))


CODECS = [  # of keys, of values, their dims
    (IntCodec(8), IntCodec(8), 128),
    (IntCodec(4, group=32), IntCodec(4, group=32), 128),
    (Float8Codec(), Float8Codec(group=64), 128),
    (TurboQuantCodec(4), TurboQuantCodec(8), 128),
    (TurboQuantCodec(3), TurboQuantCodec(5, group=32), 64),
    (TurboQuantCodec(2, seed=3), TurboQuantCodec(6), 256),
    (IntCodec(3), TurboQuantCodec(4, codebook=tuple(i - 7.5 for i in range(16))), 64),
    (IntCodec(8), IntCodec(4, group=16), 80),
    (TurboQuantCodec(7), TurboQuantCodec(1), 64),
    (TurboQuantCodec(2.25), IntCodec(7, group=32), 128),
    (IntCodec(5), IntCodec(6), 96),
]


@pytest.mark.parametrize("name", ["lengths", "ring"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("key_codec, value_codec, d", CODECS, ids=str)
def test_codes_and_scales(key_codec, value_codec, d, dtype, name):
    """A code may differ by one where its number lies between two levels."""
    b, t, s, slots, where = places(name)
    new = draw(b, t, 6, 3, d, d, d // 4, dtype, {})
    new = (*new[:2], new[2].at[0, 0, 1].set(0), *new[3:])
    caches = [full((b, s, 3, d), codec) for codec in (key_codec, value_codec)]
    f = functools.partial(qk_norm_rope_quantized_cache, **where)
    found = by_kernel(f, *new, *caches, *slots)
    cpu = jax.devices("cpu")[0]
    with backend("xla"), jax.default_device(cpu):
        operands = jax.tree.map(np.asarray, (*new, *caches, *slots))
        truth = jax.jit(lambda *a: f(*a))(*operands)
        before = jax.tree.map(np.asarray, caches)
    assert relative_errors(found[0], truth[0], 1e-2)[0] < 2 * EPSILON[dtype]
    for codec, old, after, exact in zip(
        (key_codec, value_codec), before, found[1:], truth[1:], strict=True
    ):
        np.testing.assert_allclose(after.scales, exact.scales, rtol=1e-5)
        a, e = (
            np.asarray(unpack(jnp.asarray(np.asarray(v.codes)), planes(codec, d), d))
            for v in (after, exact)
        )
        if isinstance(codec, Float8Codec):  # neighbours, but for the two zeros
            moved = np.abs(ordered(a) - ordered(e))
        else:
            moved = np.abs(a.astype(np.int32) - e)
        assert moved.max() <= 1 and moved.mean() < 2e-3
        kept = (np.asarray(exact.codes) == old.codes).all(-1)
        kept &= (np.asarray(exact.scales) == old.scales).all(-1)
        assert kept.any()
        np.testing.assert_array_equal(np.asarray(after.codes)[kept], old.codes[kept])
        np.testing.assert_array_equal(np.asarray(after.scales)[kept], old.scales[kept])


def ordered(code):
    """Bits of a float8 as numbers in its order."""
    size = (code & 0x7F).astype(np.int32)
    return np.where(code & 0x80, -size, size)


def test_nothing_but_the_new_rows_is_written_and_nothing_old_is_read():
    """In caches of NaN the written rows are finite, all others stay NaN."""
    b, t, s, slots, _ = places("lengths")
    new = draw(b, t, 8, 2, 128, 128, 64, "float32", {})
    caches = [jnp.full((b, s, 2, 128), jnp.nan) for _ in range(2)]
    query, *after = by_kernel(qk_norm_rope_cache, *new, *caches, *slots)
    assert jnp.isfinite(query).all()
    written = np.zeros((b, s), bool)
    written[0, :4] = written[2, 5:] = True
    for cache in after:
        finite = np.isfinite(np.asarray(cache))
        np.testing.assert_array_equal(finite, written[:, :, None, None] & finite)
        assert finite[written].all()


def test_a_bad_token_spoils_no_other_and_is_not_hidden():
    b, t, s, slots, _ = places("lengths")
    query, key, value, *rest = draw(b, t, 8, 2, 128, 128, 64, "float32", {})
    caches = [full((b, s, 2, 128), IntCodec(8)) for _ in range(2)]
    value = value.at[0, 2, 1, 5].set(jnp.nan)
    f = qk_norm_rope_quantized_cache
    _, keys, values = by_kernel(f, query, key, value, *rest, *caches, *slots)
    assert np.isfinite(keys.scales).all()
    bad = np.argwhere(np.isnan(values.scales))
    np.testing.assert_array_equal(bad, [[0, 2, 1, 0]])


@pytest.mark.parametrize("codec", [None, TurboQuantCodec(4)], ids=str)
def test_donated_caches_stay_where_they_are(codec):
    """In a call, in a loop of steps and beside attention: no copy, no second cache."""
    b, s, shape = 4, 4096, (4, 4096, 8, 128)
    new = draw(b, 1, 32, 8, 128, 128, 64, "bfloat16", {})
    fused = qk_norm_rope_cache if codec is None else qk_norm_rope_quantized_cache
    caches = [full(shape, codec, "bfloat16") for _ in range(2)]
    held = sum(x.nbytes for x in jax.tree.leaves(caches))
    where = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(caches)}

    def once(caches, positions, new):
        return fused(*new, *caches, positions)[1:]

    def steps(caches, positions, new):
        def step(state, _):
            caches, positions, query = state
            query, *caches = fused(query, *new[1:], *caches, positions)
            if codec is None:
                query = attention(query, *caches, kv_lengths=positions + 1)
            return (tuple(caches), positions + 1, query), None

        state = tuple(caches), positions, new[0]
        return jax.lax.scan(step, state, length=3)[0][0]

    positions = jnp.array([0, 5, 4000, s - 5])
    with backend("triton", strict=True):
        for f in (once, steps):
            run = jax.jit(f, donate_argnums=0).lower(caches, positions, new).compile()
            memory = run.memory_analysis()
            assert memory.alias_size_in_bytes == held
            assert memory.temp_size_in_bytes < held // 16
            caches = run(caches, positions, new)
            found = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(caches)}
            assert found == where


@pytest.mark.parametrize("codec", [None, IntCodec(8)], ids=str)
@pytest.mark.parametrize("form", ["scan", "loop", "slices"])
def test_caches_that_are_slices_of_one_array(form, codec):
    """XLA hands over slices of the old and of the new array, which are two."""
    shape, count = (2, 32, 2, 64), 3
    new = draw(2, 1, 4, 2, 64, 64, 32, "float32", {})
    positions = jnp.array([3, 31])
    fused = qk_norm_rope_cache if codec is None else qk_norm_rope_quantized_cache
    stacked = [full((count, *shape), codec) for _ in range(2)]

    def layer(query, caches):
        query, *caches = fused(query, *new[1:], *caches, positions)
        return query, caches

    def of(caches, i):
        return jax.tree.map(lambda x: x[i], caches)

    def scan(query, stacked):
        return jax.lax.scan(layer, query, stacked)

    def loop(query, stacked):
        def step(i, state):
            query, after = layer(state[0], of(state[1], i))
            return query, jax.tree.map(lambda x, y: x.at[i].set(y), state[1], after)

        return jax.lax.fori_loop(0, count, step, (query, stacked))

    def slices(query, stacked):
        after = []
        for i in range(count):
            query, caches = layer(query, of(stacked, i))
            after.append(caches)
        return query, jax.tree.map(lambda *x: jnp.stack(x), *after)

    f = {"scan": scan, "loop": loop, "slices": slices}[form]
    found = by_kernel(f, new[0], stacked)
    with backend("xla"):
        expected = jax.jit(f)(new[0], stacked)
    for y, e in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        if y.dtype == jnp.uint8:
            assert (np.asarray(y) != np.asarray(e)).mean() < 1e-3
        else:
            np.testing.assert_allclose(y, e, rtol=1e-4, atol=1e-5)


def test_it_is_one_launch():
    new = draw(2, 1, 8, 2, 128, 128, 64, "bfloat16", {})
    caches = [full((2, 8, 2, 128), dtype="bfloat16") for _ in range(2)]
    with backend("triton"):
        [row] = explain(qk_norm_rope_cache, *new, *caches, jnp.array([1, 2])).rows
    assert len(row.launches) == 1


def test_gradients_are_those_of_the_reference():
    b, t, s, slots, _ = places("lengths")
    new = draw(b, t, 4, 2, 64, 64, 32, "float32", {})
    caches = [full((b, s, 2, 64)) for _ in range(2)]

    def loss(*operands):
        out = qk_norm_rope_cache(*operands, *slots)
        return sum(jnp.sum(jnp.sin(x)) for x in out)

    every = tuple(range(7))
    with backend("triton"):
        found = jax.jit(jax.grad(loss, every))(*new, *caches)
    with backend("xla"):
        expected = jax.jit(jax.grad(loss, every))(*new, *caches)
    for g, e in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-4)


def test_vmap():
    b, t, s, slots, _ = places("lengths")
    new = draw(b, t, 4, 2, 64, 64, 32, "float32", {})
    caches = [full((b, s, 2, 64)) for _ in range(2)]
    operands = [*new, *caches, *slots]
    axes = [0 if i in (0, 5, 7) else None for i in range(len(operands))]
    operands = [
        x if a is None else jnp.stack([x, jnp.roll(x, 1, 0)])
        for x, a in zip(operands, axes, strict=True)
    ]
    f = jax.vmap(qk_norm_rope_cache, axes)
    found, truth = by_kernel(f, *operands), in_float64(f, *operands)
    for error in relative_errors(found, truth, 1e-2):
        assert error < 1e-5
