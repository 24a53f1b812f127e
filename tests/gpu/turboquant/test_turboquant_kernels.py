"""Kernels of the Walsh-Hadamard transform and of the vector codecs on a GPU."""

import dataclasses
import functools

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
    dequantize_vectors,
    fwht,
    quantize_vectors,
    rotate,
    update_quantized_kv_cache,
)
from jaxkern.primitives.turboquant.fwht import fwht_p
from jaxkern.primitives.turboquant.vector_codec import planes, unpack
from tests.gpu.truth import (
    EPSILON,
    check_against_float64,
    on_a_gpu,
    poison,
    relative_error,
)

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("k", range(16))
def test_transform(k, dtype):
    rng = np.random.default_rng(k)
    x = jnp.asarray(rng.standard_normal((37, 2**k)), dtype)
    check_against_float64(fwht, x)
    before, after = (jnp.asarray(rng.choice([-1, 1], 2**k), jnp.int8) for _ in range(2))
    check_against_float64(lambda x: fwht_p(x, before, after, scale="orthonormal"), x)


def test_whole_tiles_and_a_transform_that_returns():
    x = jax.random.normal(jax.random.key(0), (64, 8192))
    with backend("triton", strict=True):
        np.testing.assert_allclose(fwht(fwht(x)), x, atol=1e-5)
        impulse = jnp.zeros((32, 128), jnp.bfloat16).at[:, 3].set(1)
        np.testing.assert_array_equal(
            fwht(impulse, scale="none"), fwht(jnp.float32(impulse), scale="none")
        )
        bad = fwht(x.at[5, 77].set(jnp.nan))
    assert jnp.isnan(bad[5]).all() and jnp.isfinite(bad[:5]).all()


CODECS = [
    *(TurboQuantCodec(bits) for bits in (1, 2.25, 3, 4, 5, 6, 7, 8)),
    TurboQuantCodec(2, group=32, seed=3),
    TurboQuantCodec(4, codebook=tuple(i - 7.5 for i in range(16))),
    IntCodec(8),
    IntCodec(4, group=32),
    IntCodec(7, group=16),
    Float8Codec(),
    Float8Codec(group=32),
]


def on_the_cpu(x, codec):
    """The reference, where XLA rounds a division to the nearest."""
    with backend("xla"):
        return quantize_vectors(jax.device_put(x, jax.devices("cpu")[0]), codec)


def check_codes(x, codec, mean=2e-3):
    """Bit for bit; after a rotation, whose sums have another order, nearly so.

    x: the vectors [5, 1] are zeros.
    """
    d = x.shape[-1]
    poison(*[x] * 2)
    with backend("triton", strict=True):
        found = jax.jit(lambda x: quantize_vectors(x, codec))(x)
    truth = on_the_cpu(x, codec)
    if not isinstance(codec, TurboQuantCodec):
        np.testing.assert_array_equal(found.scales, truth.scales)
        np.testing.assert_array_equal(found.codes, truth.codes)
        return
    np.testing.assert_allclose(found.scales, truth.scales, rtol=1e-5)
    a, b = (np.asarray(unpack(v.codes, planes(codec, d), d)) for v in (found, truth))
    moved = np.abs(a.astype(np.int32) - b)
    assert moved.max() <= 1 and moved.mean() < mean
    assert (found.scales[5, 1] == 0).all() and (a[5, 1] == b[5, 1]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("d", [64, 128, 256, 512])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_codes_and_scales(codec, d, dtype):
    x = jax.random.normal(jax.random.key(d), (333, 3, d), dtype).at[5, 1].set(0)
    check_codes(x, codec)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_of_every_width(bits, dtype):
    x = jax.random.normal(jax.random.key(0), (3333, 3, 128), dtype).at[5, 1].set(0)
    check_codes(x, IntCodec(bits))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("k", [0, 1, 2, 3, 5, 10, 12, 13, 14, 15])
def test_codes_of_every_size_that_is_transformed(k, dtype):
    bits = {0: (8,), 1: (4, 8), 2: (2, 4, 6)}.get(k, (1, 3, 4, 7, 8))
    x = jax.random.normal(jax.random.key(k), (9, 3, 2**k), dtype).at[5, 1].set(0)
    for n in bits:
        check_codes(x, TurboQuantCodec(n, seed=3))


@pytest.mark.parametrize("d", [24, 80, 96, 3000])
@pytest.mark.parametrize(
    "codec", [IntCodec(8), IntCodec(5), IntCodec(4, group=8), Float8Codec()], ids=str
)
def test_codes_of_dims_that_are_no_power_of_2(codec, d):
    x = jax.random.normal(jax.random.key(d), (33, 3, d), "bfloat16").at[5, 1].set(0)
    check_codes(x, codec)


@pytest.mark.parametrize("codec", [IntCodec(2), IntCodec(4), IntCodec(7)], ids=str)
def test_codes_of_numbers_of_every_size(codec):
    x = jax.random.normal(jax.random.key(0), (240, 3, 128)).at[5, 1].set(0)
    check_codes(x * 2.0 ** jnp.arange(-118, 122)[:, None, None], codec)


@pytest.mark.parametrize("d", [64, 96])
def test_nan_is_not_hidden(d):
    x = jax.random.normal(jax.random.key(0), (20, d)).at[7, 5].set(jnp.nan)
    for codec in (IntCodec(8), IntCodec(3), Float8Codec()):
        with backend("triton", strict=True):
            scales = np.asarray(quantize_vectors(x, codec).scales)
        np.testing.assert_array_equal(np.isnan(scales)[:, 0], np.arange(20) == 7)


def check_vectors(shape, codec, dtype, unrotate=True):
    x = jax.random.normal(jax.random.key(0), shape)
    with backend("xla"):
        cache = quantize_vectors(x, codec)
    f = functools.partial(dequantize_vectors, unrotate=unrotate)
    poison(x, x)
    with backend("triton", strict=True):
        found = jax.jit(functools.partial(f, dtype=dtype))(cache)
    with jax.enable_x64(True), backend("xla"):
        scales = jnp.asarray(cache.scales, jnp.float64)
        truth = f(QuantizedVectors(cache.codes, scales, codec), dtype="float64")
    assert found.dtype == dtype
    assert relative_error(found, truth) < EPSILON[dtype]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("d", [64, 128, 512])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_vectors_of_codes(codec, d, dtype):
    check_vectors((333, 3, d), codec, dtype)
    check_vectors((5, d), codec, dtype, unrotate=False)


@pytest.mark.parametrize("k", [0, 1, 2, 3, 5, 10, 12, 13, 14, 15])
def test_vectors_of_every_size_that_is_transformed(k):
    for bits in {0: (8,), 1: (4, 8), 2: (2, 4, 6)}.get(k, (1, 3, 4, 7, 8)):
        check_vectors((27, 2**k), TurboQuantCodec(bits, seed=3), "float16")


def test_scales_of_other_dtypes():
    cache = quantize_vectors(jax.random.normal(jax.random.key(0), (9, 64)), CODECS[3])
    for dtype in ("bfloat16", "float16"):
        cast = dataclasses.replace(cache, scales=cache.scales.astype(dtype))
        with backend("triton", strict=True):
            found = dequantize_vectors(cast)
        with backend("xla"):
            truth = dequantize_vectors(cast)
        np.testing.assert_allclose(found, truth, atol=1e-5)


@pytest.mark.parametrize("bits", [3, 4, 7])
def test_a_cache_takes_new_tokens(bits):
    codec = TurboQuantCodec(bits)
    cache = QuantizedVectors.zeros((2, 16, 3, 128), codec)
    new = jax.random.normal(jax.random.key(0), (2, 5, 3, 128), jnp.bfloat16)
    written = {}
    for name in ("triton", "xla"):
        with backend(name, strict=name == "triton"):
            written[name] = jax.jit(update_quantized_kv_cache)(
                cache, new, jnp.array([3, 9])
            )
    np.testing.assert_allclose(
        written["triton"].scales, written["xla"].scales, rtol=1e-5
    )
    same = written["triton"].codes == written["xla"].codes
    assert same.mean() > 0.99


def test_rotation_keeps_inner_products():
    q, k = jax.random.normal(jax.random.key(0), (2, 100, 256))
    with backend("triton", strict=True):
        turned = (rotate(q) * rotate(k)).sum(-1)
    np.testing.assert_allclose(turned, (q * k).sum(-1), atol=1e-3)
