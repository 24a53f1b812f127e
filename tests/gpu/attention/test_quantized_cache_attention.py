"""The decode kernel over quantised caches on a GPU against the reference in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    Float8Codec,
    IntCodec,
    QuantizedVectors,
    TurboQuantCodec,
    backend,
    quantize_vectors,
    quantized_cache_attention,
)
from jaxkern.testing.checks import in_float64
from tests.gpu.attention.test_decode_attention import OPTIONS, draw
from tests.gpu.truth import on_a_gpu, poison, relative_error

pytestmark = on_a_gpu
# of the result; levels have 11 bits, and so have the weights
EPSILON = {"float32": 5e-4, "bfloat16": 4e-3, "float16": 6e-4}
CODECS = {
    "int8": IntCodec(8),
    "int4": IntCodec(4),
    "int4 by 32": IntCodec(4, group=32),
    "int8 by 16": IntCodec(8, group=16),
    **{f"int{bits}": IntCodec(bits) for bits in (3, 5, 6, 7)},
    "float8": Float8Codec(),
    "turbo8": TurboQuantCodec(8),
    "turbo4": TurboQuantCodec(4),
    "turbo3": TurboQuantCodec(3),
    "turbo5": TurboQuantCodec(5),
    "turbo6": TurboQuantCodec(6, group=64),
    "turbo7": TurboQuantCodec(7),
    "turbo2": TurboQuantCodec(2),
    "turbo1": TurboQuantCodec(1),
    "turbo2.25": TurboQuantCodec(2.25),
    "own levels": TurboQuantCodec(4, codebook=tuple(i**3 / 99 for i in range(-7, 9))),
}


def cached(x, codec):
    return x if codec is None else quantize_vectors(x, codec)


def caches(b, s, k, h, hv, key_codec, value_codec, dtype="bfloat16"):
    return (
        cached(draw((b, s, k, h), dtype, 1), key_codec),
        cached(draw((b, s, k, hv), dtype, 2) + 0.5, value_codec),
    )


def wide(x):
    if isinstance(x, QuantizedVectors):
        return dataclasses.replace(x, scales=jnp.asarray(x.scales, jnp.float64))
    return in_float64(x)


def check(query, key, value, slack=1.0, **options):
    """(out, lse) by the kernel against the reference in float64."""

    def f(query, key, value, arrays):
        return quantized_cache_attention(
            query, key, value, return_lse=True, **static, **arrays
        )

    arrays = {n: x for n, x in options.items() if isinstance(x, jax.Array)}
    static = {n: x for n, x in options.items() if n not in arrays}
    operands = query, key, value, arrays
    poison(*[query] * 8)
    with backend("triton", strict=True):
        found = jax.jit(f)(*operands)
    with jax.enable_x64(True), backend("xla"):
        is_leaf = lambda x: isinstance(x, QuantizedVectors)  # noqa: E731
        truth = jax.jit(f)(*jax.tree.map(wide, operands, is_leaf=is_leaf))
    limits = (EPSILON[query.dtype.name], 5e-4)
    for y, t, limit in zip(found, truth, limits, strict=True):
        least = 1e-2 if y.ndim == 4 else 1  # of a sum of products, its terms' size
        assert relative_error(y, t, least) < limit * slack
    return found


@pytest.mark.parametrize(
    "dtype, t, s, k, g",
    [
        ("bfloat16", 1, 4096, 8, 4),
        ("float16", 3, 1000, 2, 3),
        ("float32", 2, 300, 3, 1),
        ("float32", 2, 1, 1, 1),
    ],
)
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_codecs(codec, dtype, t, s, k, g):
    check(draw((2, t, k * g, 128), dtype), *caches(2, s, k, 128, 128, codec, codec))


@pytest.mark.parametrize("h, hv", [(64, 64), (128, 64), (64, 256), (256, 256)])
@pytest.mark.parametrize("codec", ["int8", "turbo4", "int4 by 32"])
def test_head_dims(codec, h, hv):
    codec = CODECS[codec]
    check(draw((2, 2, 8, h), "bfloat16"), *caches(2, 700, 4, h, hv, codec, codec))


@pytest.mark.parametrize("h", [32, 64, 256])
@pytest.mark.parametrize("bits", [1, 2, 3, 5, 6, 7])
def test_planes_of_other_head_dims(bits, h):
    codec = TurboQuantCodec(bits)
    check(draw((2, 2, 8, h)), *caches(2, 700, 4, h, h, codec, codec))


@pytest.mark.parametrize(
    "codec", ["int8", "float8", "int4", "int4 by 32", "int8 by 16", "int3", "int7"]
)
@pytest.mark.parametrize("h, hv", [(96, 96), (192, 128), (160, 224), (32, 256)])
def test_head_dims_with_zeros_behind_them(codec, h, hv):
    codec = CODECS[codec]
    check(draw((2, 3, 8, h), "bfloat16"), *caches(2, 700, 4, h, hv, codec, codec))


@pytest.mark.parametrize("h, codec", [(80, "int8"), (72, "int4"), (112, "none")])
def test_head_dims_of_few_whole_words(h, codec):
    codec = CODECS.get(codec)
    value = codec or IntCodec(8)
    check(
        draw((2, 1, 8, h), "float16"), *caches(2, 300, 4, h, h, codec, value, "float16")
    )


@pytest.mark.parametrize("t, g", [(8, 12), (8, 16), (4, 32), (2, 71), (8, 128)])
@pytest.mark.parametrize("codec", ["int8", "turbo4"])
def test_rows_of_several_programs(codec, t, g):
    codec, lengths = CODECS[codec], jnp.array([700, 90])
    query = draw((2, t, 2 * g, 128), "bfloat16")
    cache = caches(2, 700, 2, 128, 128, codec, codec)
    given = dict(kv_lengths=lengths, q_offset=lengths - t, causal=True)
    check(query, *cache, **given)


PAIRS = {
    "8 4": (TurboQuantCodec(8), TurboQuantCodec(4)),
    "4 3": (TurboQuantCodec(4), TurboQuantCodec(3)),
    "int4 8": (IntCodec(4, group=32), IntCodec(8)),
    "none 8": (None, TurboQuantCodec(8)),
    "4 none": (IntCodec(4), None),
    "7 5": (TurboQuantCodec(7), TurboQuantCodec(5)),
    "int7 7": (IntCodec(7, group=32), TurboQuantCodec(7, group=64)),
    "6 1": (TurboQuantCodec(6), TurboQuantCodec(1)),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_keys_and_values_of_different_codecs(pair, dtype):
    query = draw((2, 1, 16, 128), dtype)
    check(query, *caches(2, 900, 4, 128, 128, *pair, dtype=dtype))


@pytest.mark.parametrize(
    "codec, t, g, s",
    [
        ("turbo4", 1, 4, 1000),
        ("turbo4", 4, 3, 50),
        ("turbo4", 4, 3, 1000),
        ("turbo4", 8, 4, 1000),
        ("turbo7", 2, 4, 1000),
        ("int7", 1, 3, 1000),
    ],
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options, codec, t, g, s):
    options, k = dict(options), 2
    for name in ("kv_lengths", "q_offset"):
        if name in options:
            options[name] = jnp.asarray(options[name], jnp.int32)
    if options.pop("sinks", False):
        options["sinks"] = draw((k * g,))
    codec = CODECS[codec]
    key, value = caches(4, s, k, 128, 128, codec, codec)
    check(draw((4, t, k * g, 128)), key, value, slack=2, **options)


@pytest.mark.parametrize("codec", ["int8", "int4 by 32", "turbo4", "turbo7"])
def test_64k_tokens(codec):
    codec = CODECS[codec]
    query = draw((1, 1, 8, 128), "bfloat16")
    check(query, *caches(1, 65_536 + 77, 2, 128, 128, codec, codec))


def test_scales_far_apart():
    """Weights stay within float16 though scales do not, whatever their order."""
    codec = IntCodec(8)
    key, value = caches(2, 2000, 2, 128, 128, codec, codec, "float32")
    spread = 10.0 ** jnp.linspace(-9, 6, 2000)[:, None, None]
    spread = jnp.stack([spread, spread[::-1]])
    value = dataclasses.replace(value, scales=value.scales * spread)
    check(draw((2, 1, 8, 128)), key, value)
    zeros = dataclasses.replace(value, scales=value.scales * 0)
    check(draw((2, 1, 8, 128)), key, zeros)


def test_large_and_small_queries():
    codec = CODECS["turbo4"]
    key, value = caches(2, 500, 2, 128, 128, codec, codec)
    query = draw((2, 1, 8, 128))
    check(query * 1e6, key, value, scale=1e-7)
    check(query * 1e-6, key, value, scale=1e5)
    check(query.at[0].set(0), key, value)


@pytest.mark.parametrize("s", [60, 5000])
def test_nan_behind_the_lengths_has_no_influence(s):
    codec = CODECS["turbo4"]
    key, value = caches(4, s, 2, 128, 128, codec, codec)
    query = draw((4, 1, 8, 128), "bfloat16")
    lengths = jnp.array([0, 1, s // 2, s - 1])
    behind = (jnp.arange(s) >= lengths[:, None])[:, :, None, None]

    def dirty(x):
        return dataclasses.replace(x, scales=jnp.where(behind, jnp.nan, x.scales))

    with backend("triton", strict=True):
        f = jax.jit(
            lambda k, v: quantized_cache_attention(query, k, v, kv_lengths=lengths)
        )
        clean, spoiled = f(key, value), f(dirty(key), dirty(value))
    np.testing.assert_array_equal(clean, spoiled)
    assert np.isfinite(np.asarray(spoiled, np.float32)).all()
    assert (spoiled[0] == 0).all()


@pytest.mark.parametrize("codec", ["int8", "int4", "turbo4", "turbo7"])
def test_lengths_may_change_between_replays(codec):
    codec, s = CODECS[codec], 9000
    key, value = caches(1, s, 8, 128, 128, codec, codec)
    query = draw((1, 1, 32, 128), "bfloat16")
    lengths = [jnp.array([n]) for n in (0, 1, 77, s // 2, s - 1, s)]

    @jax.jit
    def every(lengths):
        return [
            quantized_cache_attention(query, key, value, kv_lengths=n) for n in lengths
        ]

    with backend("triton", strict=True):
        first, reverse, again = (every(x) for x in (lengths, lengths[::-1], lengths))
    for y, other, same in zip(first, reverse[::-1], again, strict=True):
        np.testing.assert_array_equal(y, other)
        np.testing.assert_array_equal(y, same)
    assert not first[0].any() and all(y.any() for y in first[1:])


def test_nan_among_the_keys_reaches_its_sequence_alone():
    codec = CODECS["int8"]
    key, value = caches(2, 3000, 2, 128, 128, codec, codec)
    key = dataclasses.replace(key, scales=key.scales.at[0, 2999, 0].set(jnp.nan))
    with backend("triton", strict=True):
        out = quantized_cache_attention(draw((2, 1, 8, 128), "bfloat16"), key, value)
    bad = np.isnan(np.asarray(out, np.float32))
    assert bad[0, :, :4].all() and not bad[0, :, 4:].any() and not bad[1].any()


def test_transformations():
    codec = CODECS["turbo4"]
    key, value = caches(6, 700, 2, 64, 64, codec, codec)
    query = draw((3, 2, 1, 8, 64))
    lengths = jnp.array([[700, 3], [0, 64], [65, 699]])
    stacked = jax.tree.map(lambda x: x.reshape(3, 2, *x.shape[1:]), (key, value))
    first = jax.tree.map(lambda x: x[0], stacked)

    def f(query, cache, length):
        return quantized_cache_attention(
            query, *cache, kv_lengths=length, return_lse=True
        )

    def every(query, stacked):
        each = jax.vmap(f)(query, stacked, lengths)
        shared = jax.vmap(f, (0, None, None))(query, first, lengths[0])
        scanned = jax.lax.scan(lambda q, n: (q, f(q, first, n)), query[0], lengths)[1]
        return each, shared, scanned

    with backend("triton", strict=True):
        found = jax.jit(every)(query, stacked)
    exact = jax.default_matmul_precision("highest")
    with backend("xla"), exact:
        truth = jax.jit(every)(query, stacked)
    for y, t in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(y, t, atol=2e-3)


def test_gradients_from_the_lse_of_the_kernel():
    codec = CODECS["turbo4"]
    key, value = caches(2, 300, 2, 64, 64, codec, codec)

    def loss(query):
        return jnp.sum(jnp.sin(quantized_cache_attention(query, key, value)))

    query = draw((2, 1, 8, 64))
    slopes = []
    for name in ("triton", "xla"):
        with backend(name), jax.default_matmul_precision("highest"):
            slopes.append(jax.jit(jax.grad(loss))(query))
    np.testing.assert_allclose(*slopes, atol=1e-3)
