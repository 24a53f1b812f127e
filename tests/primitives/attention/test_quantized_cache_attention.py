"""quantized_cache_attention: attention over the decoded caches, rotations folded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    IntCodec,
    QuantizedVectors,
    TurboQuantCodec,
    attention,
    dequantize_vectors,
    quantize_vectors,
    quantized_cache_attention,
    ring_positions,
    rotate,
    rotation_signs,
    unrotate,
    update_quantized_kv_cache,
)
from jaxkern.testing.checks import bf16, boolean, case, f32, i32, u8, uniform

TQ4, TQ8 = TurboQuantCodec(4), TurboQuantCodec(8)

CASES = [
    case(
        "rotated_keys",
        query=f32(2, 2, 4, 8),
        key_codes=u8(2, 5, 2, 4),
        key_scales=uniform(2, 5, 2, 2),
        value=f32(2, 5, 2, 4),
        mask=boolean(2, 1, 2, 5, probability=0.8),
        kv_lengths=i32(2, low=2, high=6),
        q_offset=i32(2, low=2, high=5),
        sinks=f32(4),
        key_codec=TurboQuantCodec(4, group=4),
        value_codec=None,
        scale=0.5,
        causal=True,
        window=4,
        softcap=2.0,
    ),
    case(
        "hybrid",
        query=bf16(1, 1, 2, 8),
        key=bf16(1, 3, 1, 8),
        value_codes=u8(1, 3, 1, 4),
        value_scales=uniform(1, 3, 1, 1),
        key_codec=None,
        value_codec=IntCodec(4),
        scale=0.3,
    ),
]


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def operands(b=2, t=3, n=4, s=9, k=2, h=32, hv=64):
    return (
        normal(b, t, n, h),
        normal(b, s, k, h, seed=1),
        normal(b, s, k, hv, seed=2),
    )


def quantized(x, codec):
    return x if codec is None else quantize_vectors(x, codec)


def array(cache):
    return dequantize_vectors(cache) if isinstance(cache, QuantizedVectors) else cache


OPTIONS = {
    "none": {},
    "causal": dict(causal=True, window=3, softcap=1.5, scale=0.7),
    "cache": dict(
        kv_lengths=jnp.array([9, 4]), q_offset=jnp.array([6, 1]), causal=True
    ),
    "mask": dict(mask=jnp.arange(9) % 3 > 0, sinks=jnp.array([0.0, 1.0, -1.0, 2.0])),
}
PAIRS = {  # codecs of keys and values, and the options of the call
    "turboquant": (TQ4, TQ8, "cache"),
    "mixed": (TurboQuantCodec(2.25), TurboQuantCodec(3, group=16), "causal"),
    "other_signs": (TurboQuantCodec(4, seed=1), TurboQuantCodec(4, seed=2), "none"),
    "integers": (IntCodec(8), IntCodec(4, group=32), "mask"),
    "integer_keys": (IntCodec(8), TQ4, "causal"),
    "hybrid": (None, TQ8, "mask"),
    "float_values": (TQ8, None, "cache"),
    "floats": (None, None, "none"),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_equals_attention_over_the_decoded_cache(pair):
    query, key, value = operands()
    key_codec, value_codec, options = PAIRS[pair]
    key, value = quantized(key, key_codec), quantized(value, value_codec)
    weights = normal(2, 3, 4, 64, seed=3)

    def results(attend, key, value):
        def f(query):
            out, lse = attend(query, key, value, return_lse=True, **OPTIONS[options])
            return jnp.vdot(weights, out), (out, lse)

        (_, (out, lse)), dquery = jax.jit(jax.value_and_grad(f, has_aux=True))(query)
        return out, lse, dquery

    ours = results(quantized_cache_attention, key, value)
    expected = results(attention, array(key), array(value))
    for actual, e in zip(ours, expected, strict=True):
        np.testing.assert_allclose(actual, e, atol=1e-5)


def test_gradients_to_a_float_cache_and_to_scales():
    query, key, value = operands()
    key, value = key.astype(jnp.float16), quantize_vectors(value, TQ4)

    def loss(f):
        def of(key, scales):
            v = QuantizedVectors(value.codes, scales, TQ4)
            return jnp.sum(jnp.sin(f(query, key, v)))

        return jax.grad(of, (0, 1))(key, value.scales)

    ours = loss(quantized_cache_attention)
    expected = loss(lambda q, k, v: attention(q, k, dequantize_vectors(v)))
    assert ours[0].dtype == jnp.float16 and ours[1].any()
    np.testing.assert_allclose(ours[0], expected[0], atol=1e-3)
    np.testing.assert_allclose(ours[1], expected[1], atol=1e-5)


def heavy_tailed(*shape, seed):
    """Keys and values as in language models: a few dims are much larger."""
    loud = jnp.where(jnp.arange(shape[-1]) % 32 == 5, 12.0, 1.0)
    return normal(*shape, seed=seed) * loud


@pytest.mark.full
def test_error_falls_with_the_bits_and_is_below_that_of_integers():
    query = normal(1, 8, 4, 64) / 4
    key, value = (heavy_tailed(1, 128, 2, 64, seed=i) for i in (1, 2))
    exact = attention(query, key, value)

    def error(codec):
        out = quantized_cache_attention(
            query, quantize_vectors(key, codec), quantize_vectors(value, codec)
        )
        return float(jnp.linalg.norm(out - exact) / jnp.linalg.norm(exact))

    errors = {b: error(TurboQuantCodec(b)) for b in (2, 2.25, 4, 8)}
    assert list(errors.values()) == sorted(errors.values(), reverse=True)
    assert errors[4] < 0.2 and errors[8] < 0.02
    assert errors[4] < 0.5 * error(IntCodec(4))
    assert errors[8] < 0.5 * error(IntCodec(8))


def test_hybrid_rotates_neither_query_nor_keys():
    """Float keys are read as they are; rotating the query for them is wrong."""
    query, key, value = operands(h=64)
    key, value = key.astype(jnp.float16), quantize_vectors(value, TQ8)
    expected = attention(query, key, dequantize_vectors(value))
    out = quantized_cache_attention(query, key, value)
    np.testing.assert_allclose(out, expected, atol=3e-6)
    wrong = quantized_cache_attention(rotate(query), key, value)
    assert abs(wrong - expected).max() > 0.1


def test_the_query_is_rotated_and_the_result_rotated_back():
    """Rq over rotated keys, then R^T: cached vectors stay as they are."""
    query, key, value = operands(h=64)
    signs = rotation_signs(64)
    k, v = (quantize_vectors(x, TQ4) for x in (key, value))
    rotated = attention(
        rotate(query, signs),
        dequantize_vectors(k, unrotate=False),
        dequantize_vectors(v, unrotate=False),
    )
    out = quantized_cache_attention(query, k, v)
    np.testing.assert_allclose(out, unrotate(rotated, signs), atol=3e-6)


def test_decoding_over_a_quantised_ring():
    """Token by token over a ring of 5 slots = a window of 5 over all tokens."""
    query, key, value = operands(t=12, s=12, h=16, hv=16)
    through = [dequantize_vectors(quantize_vectors(x, TQ4)) for x in (key, value)]
    expected = attention(query, *through, causal=True, window=5)
    keys = values = QuantizedVectors.zeros((2, 5, 2, 16), TQ4)

    @jax.jit
    def step(keys, values, p):
        q, k, v = (
            jax.lax.dynamic_slice_in_dim(x, p, 1, axis=1) for x in (query, key, value)
        )
        keys = update_quantized_kv_cache(keys, k, p, ring=True)
        values = update_quantized_kv_cache(values, v, p, ring=True)
        by_length = quantized_cache_attention(
            q, keys, values, kv_lengths=jnp.minimum(p + 1, 5)
        )
        mask = ring_positions(p + 1, 5) >= 0
        by_mask = quantized_cache_attention(q, keys, values, mask=mask)
        return keys, values, by_length, by_mask

    for p in range(12):
        keys, values, *outs = step(keys, values, p)
        for out in outs:
            np.testing.assert_allclose(out[:, 0], expected[:, p], atol=3e-6)


def test_parts_of_the_cache_merge_by_lse_before_the_rotation_back():
    query, key, value = operands()
    k, v = (quantize_vectors(x, TQ4) for x in (key, value))
    (o1, l1), (o2, l2) = (
        quantized_cache_attention(query, k[:, part], v[:, part], return_lse=True)
        for part in (slice(0, 4), slice(4, 9))
    )
    lse = jnp.logaddexp(l1, l2)
    merged = o1 * jnp.exp(l1 - lse)[..., None] + o2 * jnp.exp(l2 - lse)[..., None]
    np.testing.assert_allclose(
        merged, quantized_cache_attention(query, k, v), atol=3e-6
    )


def test_empty_slots_are_zeros_and_a_query_without_keys_gives_zeros():
    query = normal(1, 1, 2, 16)
    empty = QuantizedVectors.zeros((1, 4, 1, 16), TQ4)
    out = quantized_cache_attention(query, empty, empty, kv_lengths=0)
    np.testing.assert_array_equal(out, jnp.zeros_like(out))
    grad = jax.grad(
        lambda q: quantized_cache_attention(q, empty, empty, kv_lengths=0).sum()
    )(query)
    assert not grad.any()


def test_result_dtype_and_precision():
    """A bfloat16 query is rotated in float32, the result rounded once."""
    query, key, value = operands(h=64)
    k, v = (quantize_vectors(x, TQ8) for x in (key, value))
    query = query.astype(jnp.bfloat16)
    out = quantized_cache_attention(query, k, v)
    assert out.dtype == jnp.bfloat16
    whole = quantized_cache_attention(query.astype(jnp.float32), k, v)
    np.testing.assert_array_equal(out, whole.astype(jnp.bfloat16))


def test_every_error_says_what_to_do():
    query, key, value = operands()
    k, v = (quantize_vectors(x, TQ4) for x in (key, value))
    with pytest.raises(TypeError, match=r"dim `h` is 16 in `query` but 32 in `key`"):
        quantized_cache_attention(query[..., :16], k, v)
    with pytest.raises(TypeError, match=r"dim `s` is 9 in `key_codes` but 8 in"):
        quantized_cache_attention(query, k, v[:, :8])
    with pytest.raises(TypeError, match=r"`key` must have dims \[b, rows, heads"):
        quantized_cache_attention(query, k[0], v)
    with pytest.raises(ValueError, match=r"window is 0"):
        quantized_cache_attention(query, k, v, window=0)
    with pytest.raises(ValueError, match=r"softcap is -1"):
        quantized_cache_attention(query, k, v, softcap=-1.0)
    with pytest.raises(ValueError, match=r"ambiguous. Pass q_offset"):
        quantized_cache_attention(query, k, v, kv_lengths=5, causal=True)
