"""Kernels of gated_rms_norm on a GPU: long and odd rows, bad rows, none."""

import jax
import jax.numpy as jnp
import pytest

from jaxkern import backend, gated_rms_norm
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
@pytest.mark.parametrize("d", [*WIDTHS, 5000, 8192, *LONG])
def test_long_and_odd_rows(d, dtype):
    draw, n = draws(dtype, d), rows_of(d)
    x, gate, weight = draw(n, d), draw(n, d), draw(d)

    def gate_first(*operands):
        return gated_rms_norm(*operands, norm_before_gate=False)

    for f in (gated_rms_norm, gate_first):
        check_against_float64(f, x, gate, weight, slack=2)
        check_against_float64(f, x, gate, slack=2)


def test_residual_and_weights_of_other_dtypes():
    low, wide = draws("bfloat16"), draws("float32", 1)
    operands = low(5, 1000), wide(5, 1000), wide(1000)
    check_against_float64(gated_rms_norm, *operands, slack=2)


def test_a_bad_row_spoils_no_other():
    check_bad_rows(gated_rms_norm)


def test_nothing_gives_nothing():
    x, weight = jnp.zeros((0, 16)), jnp.ones(16)
    with backend("triton", strict=True):
        slope = jax.grad(lambda x, w: gated_rms_norm(x, x, w).sum(), (0, 1))
        dx, dweight = slope(x, weight)
    assert dx.shape == x.shape and (dweight == 0).all()


@pytest.mark.parametrize("n, d", STREAMED)
def test_gradients_of_long_rows_are_the_same_each_time(n, d):
    draw = draws("bfloat16")
    check_same_gradients(gated_rms_norm, draw(n, d), draw(n, d), draw(d))
