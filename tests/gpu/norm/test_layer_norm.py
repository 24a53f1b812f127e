"""Triton kernels of layer_norm on a GPU: long and odd rows, a mean far from zero."""

import jax
import pytest

from jaxkern import layer_norm
from tests.gpu.norm.rows import DTYPES, ODD, check_long_and_odd_rows
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", ODD)
def test_long_and_odd_rows(d, dtype):
    check_long_and_odd_rows(layer_norm, d, dtype)


def test_rows_far_from_zero_keep_their_variance():
    x = 1000 + jax.random.normal(jax.random.key(0), (64, 5000))
    check_against_float64(layer_norm, x, slack=50)  # x itself is known to 6e-5
