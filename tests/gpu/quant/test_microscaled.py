"""MXFP4, NVFP4 and MXFP8 on a GPU: products and rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    MicroscaledTensor,
    backend,
    quantize_microscaled,
    quantized_embedding,
    quantized_matmul,
)
from tests.gpu.quant.row_checks import (
    check_experts,
    check_product,
    check_rows,
    check_weights,
    normal,
    on_the_cpu,
)
from tests.gpu.truth import on_a_gpu

pytestmark = on_a_gpu


def weights(format, *shape):
    quantize = functools.partial(quantize_microscaled, format=format)
    return on_the_cpu(quantize, normal(shape))


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "mxfp8"])
def test_products(format):
    w, values = weights(format, 96, 4096)
    for rows in (1, 2, 7, 16, 40):
        check_product(w, values, rows)
    check_rows(w, values)


@pytest.mark.parametrize("tokens, top_k", [(1, 4), (3, 2), (8, 8)])
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_experts(format, tokens, top_k):
    check_experts(*weights(format, 5, 48, 2880), tokens, top_k)
    check_experts(*weights(format, 5, 83, 512), tokens, top_k, "float16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "mxfp8"])
def test_weights(format, dtype):
    check_weights(*weights(format, 3, 5, 2880), dtype)
    check_weights(*weights(format, 48, 512), dtype)


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "mxfp8"])
def test_sizes_that_nothing_divides(format):
    check_product(*weights(format, 83, 2880), 1)
    check_product(*weights(format, 83, 2880), 3, "float32")


def test_scales_that_are_not_normal():
    """2**-127, which is subnormal, and NaN."""
    scales = np.full((16, 8), 127, np.uint8)
    scales[3], scales[5, 2] = 0, 255
    codes = np.full((16, 128), 0x22, np.uint8)  # ones
    w = MicroscaledTensor(jnp.asarray(codes), jnp.asarray(scales), None, "mxfp4")
    x = jnp.full((1, 256), 2.0**100, jnp.bfloat16)
    with backend("triton", strict=True):
        found = np.asarray(jax.jit(quantized_matmul)(x, w), np.float64)[0]
        rows = jax.jit(quantized_embedding)(jnp.asarray([3, 5]), w)
    truth = np.full(16, 256 * 2.0**100)
    truth[3], truth[5] = 256 * 2.0**-27, np.nan
    np.testing.assert_array_equal(found, truth)
    assert np.isnan(rows[1, 64:96]).all() and (np.asarray(rows[1, :64]) == 1).all()
