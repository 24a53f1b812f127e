"""Kernels of multi_rms_norm on a GPU: two and three readers, long and odd rows."""

import pytest

from jaxkern import multi_rms_norm
from tests.gpu.norm.rows import DTYPES, LONG, WIDTHS, draws, rows_of, terms_of
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [*WIDTHS, 5376, 8192, *LONG])
def test_two_readers(d, dtype):
    draw, n = draws(dtype, d), rows_of(d)
    check_against_float64(
        multi_rms_norm, draw(n, d), draw(d), draw(d), least=terms_of(d)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [*WIDTHS, *LONG])
def test_three_readers(d, dtype):
    draw, n = draws(dtype, d), rows_of(d)
    x, weights = draw(n, d), [draw(d) for _ in range(3)]
    check_against_float64(multi_rms_norm, x, *weights, least=terms_of(d))
    check_against_float64(
        lambda x, w: multi_rms_norm(x, None, w, None, offset=1.0), x, weights[0]
    )
