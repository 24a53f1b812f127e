"""8-bit floats with block scales on a GPU: products and rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import FP8Tensor, backend, quantize_fp8, quantized_matmul
from tests.gpu.quant.row_checks import check_product, check_rows, normal, on_the_cpu
from tests.gpu.truth import on_a_gpu

pytestmark = on_a_gpu


def weights(block, *shape):
    return on_the_cpu(functools.partial(quantize_fp8, block=block), normal(shape))


@pytest.mark.parametrize("block", [(128, 128), (1, 0), (0, 0), (1, 128)])
def test_products(block):
    w, values = weights(block, 256, 4096)
    for rows in (1, 16, 50):
        check_product(w, values, rows)
    check_rows(w, values)


def test_parts_of_blocks():
    w, values = weights((128, 128), 200, 1500)
    check_product(w, values, 3)
    check_rows(w, values, "float32")


def test_every_code_and_nan():
    codes = np.tile(np.arange(256, dtype=np.uint8), (16, 4))
    numbers = np.where(codes % 128 == 127, 0, codes)  # without NaN
    scales = jnp.full((1, 1), 0.5)
    x = jnp.asarray(normal((1, 1024)), jnp.bfloat16)
    for given in (numbers, np.where(np.arange(16)[:, None] == 5, codes, numbers)):
        w = FP8Tensor(jnp.asarray(given), scales)
        with backend("triton", strict=True):
            found = np.asarray(jax.jit(quantized_matmul)(x, w), np.float64)[0]
        bad = (given % 128 == 127).any(axis=1)
        values = given.view(jnp.float8_e4m3fn).astype(np.float64) * 0.5
        truth = values @ np.asarray(x, np.float64)[0]
        assert np.isnan(found[bad]).all()
        np.testing.assert_allclose(found[~bad], truth[~bad], rtol=1e-2)
