"""Kernels of linear_cross_entropy on a GPU: blocks, groups, a frozen weight."""

import jax
import numpy as np
import pytest

from jaxkern import backend, explain, linear_cross_entropy
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


@pytest.mark.parametrize("options", [{}, EVERY], ids=["plain", "every_option"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tokens, d, v", [(60, 128, 1000), (1999, 520, 5003)])
def test_the_mean_by_groups_of_tokens(tokens, d, v, dtype, options):
    labels = draw_labels(tokens, v).at[1].set(0)
    x = draw(tokens, d, dtype=dtype, scale=1)
    weight = draw(v, d, dtype=dtype, scale=3 / d**0.5)

    def f(x, weight):
        return linear_cross_entropy(x, weight, labels, reduction="mean", **options)

    # gradients of the mean are small; the backward pass, two products, has no kernel
    least = [1e-2, 1e-9, 1e-9]
    with jax.default_matmul_precision("highest"):
        check_against_float64(f, x, weight, slack=5.0, least=least, strict=False)
    with backend("triton"):
        text = str(explain(jax.grad(f, (0, 1)), x, weight))
    assert "triton.loss.summed_linear_cross_entropy" in text
