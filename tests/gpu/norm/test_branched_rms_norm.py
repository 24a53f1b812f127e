"""Triton kernels of branched_rms_norm on a GPU: long and odd rows, an offset."""

import pytest

from jaxkern import branched_rms_norm
from tests.gpu.norm.rows import DTYPES, draws, rows_of
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [13, 256, 2048, 5000, 16384, 131071])
def test_both_paths(d, dtype):
    draw = draws(dtype, d)

    def shifted(*operands):
        return branched_rms_norm(*operands, offset=1.0)

    check_against_float64(shifted, draw(rows_of(d), d), draw(d))
    check_against_float64(branched_rms_norm, draw(rows_of(d), d))
