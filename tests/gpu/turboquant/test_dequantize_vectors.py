"""Kernels from codes to vectors on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    QuantizedVectors,
    TurboQuantCodec,
    backend,
    dequantize_vectors,
    quantize_vectors,
)
from tests.gpu.truth import EPSILON, on_a_gpu, poison, relative_error
from tests.gpu.turboquant.codecs import CODECS

pytestmark = on_a_gpu


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
