"""Kernels of l2_norm on a GPU: long and odd rows."""

import pytest

from jaxkern import l2_norm
from tests.gpu.norm.rows import DTYPES, WIDTHS, draws, rows_of
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [*WIDTHS, 8193, 40001])
def test_l2_norm_of_long_and_odd_rows(d, dtype):
    check_against_float64(l2_norm, draws(dtype, d)(rows_of(d), d), slack=2)
