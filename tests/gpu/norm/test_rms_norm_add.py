"""Kernels of rms_norm_add on a GPU: long and odd rows, every operand."""

import pytest

from jaxkern import rms_norm_add
from tests.gpu.norm.rows import (
    DTYPES,
    LONG,
    STREAMED,
    WIDTHS,
    check_bad_rows,
    check_same_gradients,
    draws,
    rows_of,
)
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [*WIDTHS, 5376, 8192, *LONG])
def test_long_and_odd_rows(d, dtype):
    draw, n = draws(dtype, d), rows_of(d)
    x, residual, weight = draw(n, d), draw(n, d), draw(d)
    check_against_float64(rms_norm_add, x, residual, weight)
    check_against_float64(rms_norm_add, x, residual)
    check_against_float64(rms_norm_add, x, residual, weight, draw(d), slack=2)
    check_against_float64(rms_norm_add, x, residual, weight, draw(1), slack=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, d", [(1, 1536), (64, 8192), (3, 1000), (65, 1536)])
def test_few_rows(n, d, dtype):
    """Of a decode step: a program has one whole, up to 64 of them."""
    draw = draws(dtype, d)
    x, residual, weight = draw(n, d), draw(n, d), draw(d)
    check_against_float64(rms_norm_add, x, residual)
    check_against_float64(rms_norm_add, x, residual, weight, draw(d), slack=2)
    check_against_float64(rms_norm_add, x, residual, weight, draw(1), slack=2)


def test_residual_and_weights_of_other_dtypes():
    low, wide = draws("bfloat16"), draws("float32", 1)
    operands = low(5, 1000), wide(5, 1000), wide(1000)
    check_against_float64(rms_norm_add, *operands, slack=2)


def test_a_bad_row_spoils_no_other():
    check_bad_rows(rms_norm_add)


@pytest.mark.parametrize("n, d", STREAMED)
def test_gradients_of_long_rows_are_the_same_each_time(n, d):
    draw = draws("bfloat16")
    check_same_gradients(rms_norm_add, draw(n, d), draw(n, d), draw(d))
