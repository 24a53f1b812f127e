"""Kernels of sandwich_rms_norm on a GPU: two and four weights, long and odd rows."""

import pytest

from jaxkern import sandwich_rms_norm
from tests.gpu.norm.rows import (
    DTYPES,
    LONG,
    STREAMED,
    WIDTHS,
    check_same_gradients,
    draws,
    rows_of,
    terms_of,
)
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [*WIDTHS, 5376, 8192, *LONG])
def test_long_and_odd_rows(d, dtype):
    draw, n = draws(dtype, d), rows_of(d)
    operands = draw(n, d), draw(n, d), draw(d), draw(d)
    check_against_float64(sandwich_rms_norm, *operands, slack=4, least=terms_of(d, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [*WIDTHS, *LONG])
def test_three_readers(d, dtype):
    draw, n = draws(dtype, d), rows_of(d)
    operands = draw(n, d), draw(n, d), *(draw(d) for _ in range(4))
    check_against_float64(sandwich_rms_norm, *operands, slack=4, least=terms_of(d, 2))


def test_residual_and_weights_of_other_dtypes():
    low, wide = draws("bfloat16"), draws("float32", 1)
    operands = low(5, 1000), wide(5, 1000), wide(1000), low(1000)
    check_against_float64(sandwich_rms_norm, *operands, slack=2)


@pytest.mark.parametrize("n, d", STREAMED)
def test_gradients_of_long_rows_are_the_same_each_time(n, d):
    draw = draws("bfloat16")
    check_same_gradients(sandwich_rms_norm, draw(n, d), draw(n, d), draw(d), draw(d))
