"""Triton kernels of add_rms_norm on a GPU: long and odd rows, an offset."""

import pytest

from jaxkern import add_rms_norm
from tests.gpu.norm.rows import DTYPES, ODD, check_long_and_odd_rows, draws
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", ODD)
def test_long_and_odd_rows(d, dtype):
    check_long_and_odd_rows(add_rms_norm, d, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [13, 1000, 5000, 16384, 131071])
def test_an_offset(d, dtype):
    draw = draws(dtype, d)

    def shifted(*operands):
        return add_rms_norm(*operands, offset=1.0)

    check_against_float64(shifted, draw(37, d), draw(37, d), draw(d))
