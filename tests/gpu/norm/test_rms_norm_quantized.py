"""Kernels of norms with codes as a result on a GPU: within half a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import add_rms_norm_quantized, backend, rms_norm_quantized
from tests.gpu.norm.rows import DTYPES, draws
from tests.gpu.truth import on_a_gpu, poison

pytestmark = on_a_gpu


def decoded(codes, scales, block):
    if codes.dtype == jnp.uint8:
        codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    wide = jnp.repeat(scales, block, axis=-1)[..., : codes.shape[-1]]
    return np.asarray(codes.astype(jnp.float32) * wide, np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 13, 128, 1000, 1025, 2816, 5000, 16384, 40001])
@pytest.mark.parametrize("block", [None, 128, 32])
@pytest.mark.parametrize("format", ["e4m3fn", "int8"])
def test_quantised_norms_are_within_half_a_step(format, block, d, dtype):
    draw = draws(dtype, d)
    x, residual, weight = draw(37, d).at[5].set(0), draw(37, d).at[5].set(0), draw(d)
    width = min(block or d, d)
    poison(x)
    with backend("triton", strict=True):
        codes, scales, total = jax.jit(
            lambda *a: add_rms_norm_quantized(*a, format=format, block=block)
        )(x, residual, weight)
        alone = jax.jit(lambda *a: rms_norm_quantized(*a, format=format, block=block))(
            x, weight
        )
    u, w = (np.asarray(v, np.float64) for v in (x, weight))
    both = u + np.asarray(residual, np.float64)
    np.testing.assert_array_equal(
        total, (x.astype(jnp.float32) + residual).astype(dtype)
    )
    for rows, found in ((u, alone), (both, (codes, scales))):
        y = rows / np.sqrt((rows * rows).mean(-1, keepdims=True) + 1e-6) * w
        step = np.repeat(np.asarray(found[1], np.float64), width, -1)[:, :d]
        half = step / 2
        if format == "e4m3fn":  # 3 digits behind the first, 2**-9 at the least
            half = np.maximum(np.abs(y) / 16, step / 1024)
        error = np.abs(decoded(*found, width) - y)
        assert (error <= half * 1.001 + 1e-5 * np.abs(y)).all()
        assert (np.asarray(found[1])[5] == 1).all()
        largest = np.abs(decoded(*found, width)).max(-1)
        np.testing.assert_allclose(largest, np.abs(y).max(-1), rtol=1e-4, atol=1e-6)
