"""Kernels from vectors to codes on a GPU: bit for bit, every codec."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import Float8Codec, IntCodec, TurboQuantCodec, backend, quantize_vectors
from jaxkern.primitives.turboquant.vector_codec import planes, unpack
from tests.gpu.truth import on_a_gpu, poison
from tests.gpu.turboquant.codecs import CODECS

pytestmark = on_a_gpu


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
