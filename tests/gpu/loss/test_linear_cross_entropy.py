"""Kernels of linear_cross_entropy on a GPU: blocks, every option, a frozen weight."""

import jax
import numpy as np
import pytest

from jaxkern import backend, linear_cross_entropy
from tests.gpu.loss.labelled import EVERY, draw, draw_labels
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("options", [{}, EVERY], ids=["plain", "every_option"])
@pytest.mark.parametrize("v, block_size", [(1000, 256), (5003, None)])
def test_linear_cross_entropy_by_blocks(v, block_size, options, dtype):
    labels = draw_labels(60, v).at[1].set(0)
    operands = draw(60, 128, dtype=dtype, scale=1), draw(v, 128, dtype=dtype, scale=0.2)

    def f(x, weight):
        return linear_cross_entropy(
            x, weight, labels, block_size=block_size, return_lse=True, **options
        )

    with jax.default_matmul_precision("highest"):
        check_against_float64(f, *operands, slack=5.0)


def test_linear_cross_entropy_of_a_frozen_weight():
    x, weight, labels = draw(60, 128), draw(1000, 128), draw_labels(60, 1000)

    def slope(x):
        return jax.grad(lambda x: linear_cross_entropy(x, weight, labels).sum())(x)

    with jax.default_matmul_precision("highest"), backend("triton", strict=True):
        found = jax.jit(slope)(x)
    with jax.default_matmul_precision("highest"), backend("xla"):
        np.testing.assert_allclose(found, jax.jit(slope)(x), rtol=1e-4, atol=1e-5)
