"""Kernels of rms_norm_mul on a GPU: long and odd rows, bad rows."""

import pytest

from jaxkern import rms_norm_mul
from tests.gpu.norm.rows import DTYPES, LONG, WIDTHS, check_bad_rows, draws, rows_of
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [*WIDTHS, 5000, 8192, *LONG])
def test_long_and_odd_rows(d, dtype):
    draw, n = draws(dtype, d), rows_of(d)
    check_against_float64(rms_norm_mul, draw(n, d), draw(n, d), draw(d), slack=2)


def test_a_bad_row_spoils_no_other():
    check_bad_rows(rms_norm_mul)
