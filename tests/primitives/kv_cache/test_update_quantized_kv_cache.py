"""update_quantized_kv_cache: the codes of the vectors, in the slots of the tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    IntCodec,
    QuantizedVectors,
    TurboQuantCodec,
    dequantize_vectors,
    quantize_vectors,
    update_kv_cache,
    update_quantized_kv_cache,
)
from jaxkern.testing.checks import bf16, case, f32, i32, u8

TQ4, INT4 = TurboQuantCodec(4), IntCodec(4, group=8)
CODECS = [INT4, IntCodec(8), TurboQuantCodec(2.25), TQ4, TurboQuantCodec(8, group=16)]

CASES = [
    case(
        "turboquant",
        full=True,
        codes=u8(2, 8, 2, 4),
        scales=f32(2, 8, 2, 1),
        new=f32(2, 3, 2, 8),
        positions=i32(2, low=-1, high=8),
        codec=TQ4,
    ),
    case(
        "ring",
        codes=u8(2, 4, 1, 8),
        scales=f32(2, 4, 1, 2),
        new=bf16(2, 5, 1, 16),
        positions=i32(2, high=30),
        new_lengths=i32(2, high=6),
        codec=INT4,
        ring=True,
    ),
    case(
        "no_tokens",
        codes=u8(1, 4, 1, 8),
        scales=f32(1, 4, 1, 1),
        new=f32(1, 0, 1, 16),
        positions=i32(1, high=4),
        codec=TQ4,
    ),
]


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_reads_as_the_quantised_tokens_in_a_plain_cache(codec, ring):
    """Three updates of 3 tokens over 7 slots: the last ones fall out or go round."""
    cache = QuantizedVectors.zeros((2, 7, 2, 32), codec)
    plain = jnp.zeros((2, 7, 2, 32))
    for step in range(3):
        new, at = normal(2, 3, 2, 32, seed=step), jnp.array([3 * step, 3 * step + 1])
        cache = update_quantized_kv_cache(cache, new, at, ring=ring)
        through = dequantize_vectors(quantize_vectors(new, codec))
        plain = update_kv_cache(plain, through, at, ring=ring)
    np.testing.assert_allclose(dequantize_vectors(cache), plain, atol=1e-5)


def test_padding_is_not_written():
    cache = QuantizedVectors.zeros((2, 4, 1, 16), TQ4)
    new = normal(2, 3, 1, 16)
    cache = update_quantized_kv_cache(cache, new, 1, jnp.array([3, 1]))
    written = cache.scales[..., 0, 0] > 0
    np.testing.assert_array_equal(written, [[0, 1, 1, 1], [0, 1, 0, 0]])
    assert not cache.codes[1, 2:].any()


def test_one_position_for_all_and_scales_of_the_cache():
    cache = QuantizedVectors.zeros((2, 4, 1, 16), TQ4, jnp.float16)
    new = normal(2, 1, 1, 16)
    cache = update_quantized_kv_cache(cache, new, 2)
    assert cache.scales.dtype == jnp.float16
    assert not cache.scales[:, :2].any() and cache.scales[:, 2].all()
    rounded = quantize_vectors(new, TQ4).scales.astype(jnp.float16)
    np.testing.assert_array_equal(cache[:, 2].scales, rounded[:, 0])


def test_sizes_for_a_head_of_256():
    """The hybrid is 2.65 times smaller than float32, not 3.19 times."""
    shape = (1, 64, 4, 256)
    float32 = 2 * 4 * np.prod(shape)

    def nbytes(codec):
        return QuantizedVectors.zeros(shape, codec).nbytes

    tq8, tq4 = nbytes(TurboQuantCodec(8)), nbytes(TurboQuantCodec(4))
    hybrid = 2 * np.prod(shape) + tq8
    assert round(float32 / hybrid, 2) == 2.65
    assert round(float32 / (2 * tq8), 2) == 3.94
    assert round(float32 / (2 * tq4), 2) == 7.76
    assert round(float32 / (2 * nbytes(IntCodec(4, 32))), 2) == 6.40


@pytest.mark.parametrize("b", [1, 3])
def test_a_donated_cache_is_written_in_place(b):
    @functools.partial(jax.jit, donate_argnums=0)
    def decode(cache, new, positions):
        def step(i, cache):
            return update_quantized_kv_cache(cache, new * i, positions + i, ring=True)

        return jax.lax.fori_loop(0, 5, step, cache)

    cache = jax.eval_shape(lambda: QuantizedVectors.zeros((b, 4096, 2, 64), TQ4))
    new = jax.ShapeDtypeStruct((b, 1, 2, 64), jnp.float32)
    positions = jax.ShapeDtypeStruct((b,), jnp.int32)
    memory = decode.lower(cache, new, positions).compile().memory_analysis()
    assert memory.alias_size_in_bytes == b * 4096 * 2 * (32 + 4)
    assert memory.temp_size_in_bytes < 2**17


def test_errors():
    cache = QuantizedVectors.zeros((1, 4, 1, 32), TQ4)
    with pytest.raises(
        TypeError, match=r"`new` has 16 dims and 1 scales, the cache 32"
    ):
        update_quantized_kv_cache(cache, jnp.zeros((1, 1, 1, 16)), 0)
    with pytest.raises(TypeError, match=r"dim `k` is 1 in `codes` but 2 in `new`"):
        update_quantized_kv_cache(cache, jnp.zeros((1, 1, 2, 32)), 0)
    with pytest.raises(TypeError, match=r"`cache` must be QuantizedVectors"):
        update_quantized_kv_cache(jnp.zeros((1, 4, 1, 32)), jnp.zeros((1, 1, 1, 32)), 0)
