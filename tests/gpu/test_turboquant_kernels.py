"""Kernels of the Walsh-Hadamard transform and of the vector codecs on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    IntCodec,
    QuantizedVectors,
    TurboQuantCodec,
    backend,
    fwht,
    quantize_vectors,
    rotate,
    update_quantized_kv_cache,
)
from jaxkern.primitives.turboquant.fwht import fwht_p
from jaxkern.primitives.turboquant.vector_codec import planes, unpack
from tests.gpu.truth import check_against_float64, on_a_gpu

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
    TurboQuantCodec(4),
    TurboQuantCodec(8),
    TurboQuantCodec(2, group=32, seed=3),
    TurboQuantCodec(4, codebook=tuple(i - 7.5 for i in range(16))),
    IntCodec(8),
    IntCodec(4, group=32),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("d", [64, 128, 256, 512])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_codes_and_scales(codec, d, dtype):
    """A code may differ by one where its number lies between two levels."""
    x = jax.random.normal(jax.random.key(d), (333, 3, d), dtype).at[5, 1].set(0)
    with backend("triton", strict=True):
        found = jax.jit(lambda x: quantize_vectors(x, codec))(x)
    with backend("xla"):
        truth = quantize_vectors(x, codec)
    np.testing.assert_allclose(found.scales, truth.scales, rtol=1e-5)
    a, b = (
        np.asarray(unpack(v.codes, planes(codec, d), d), np.int32)
        for v in (found, truth)
    )
    moved = np.abs(a - b)
    assert moved.max() <= 1 and moved.mean() < 2e-3
    assert (found.scales[5, 1] == 0).all() and (a[5, 1] == b[5, 1]).all()


def test_a_cache_takes_new_tokens():
    codec = TurboQuantCodec(4)
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
