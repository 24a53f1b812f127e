"""Codes of 8 bits and their transpose on a GPU: those of NumPy, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkern import backend
from jaxkern.primitives.linear.encode_fp8 import encode_fp8_p
from tests.gpu.truth import on_a_gpu, poison

pytestmark = on_a_gpu
SHAPES = [(1, 1, 1), (2, 3, 13), (1, 130, 64), (3, 65, 200), (2, 1024, 2048)]


@pytest.mark.parametrize("form", ["e4m3fn", "e5m2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_and_their_transpose(shape, dtype, form):
    dtype = jnp.dtype(dtype)
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    x.reshape(-1)[::7] *= np.array(1e-3, dtype)  # below the normal ones
    x.reshape(-1)[-1] = np.nan
    given = jnp.asarray(x)
    poison(given)
    with backend("triton", strict=True):
        encode = jax.jit(functools.partial(encode_fp8_p, form=form))
        codes, turned = map(np.asarray, encode(given, jnp.float32(0.25)))
    eight = getattr(ml_dtypes, f"float8_{form}")
    expected = (x.astype(np.float32) / 0.25).astype(eight).view(np.uint8)
    number = ~np.isnan(x)
    np.testing.assert_array_equal(codes[number], expected[number])
    assert np.isnan(codes.view(eight)[~number].astype(np.float32)).all()
    np.testing.assert_array_equal(turned, np.moveaxis(codes, 2, 0))
