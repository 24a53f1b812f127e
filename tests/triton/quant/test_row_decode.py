"""Rows of packed codes as floats by Triton's kernel, interpreted: each way to read.

And activations in the order of lanes.

The products are not: Gluon has no interpreter, see tests/gpu/quant/.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.triton.quant.lane_order import in_lane_order
from jaxkern.triton.quant.row_codes import BITS
from jaxkern.triton.quant.row_decode import decoded
from jaxkern.triton.quant.row_problem import Rows
from tests.triton.interpreted import (
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)
from tests.triton.quant import lanes
from tests.triton.quant.test_row_products import by_formula

CASES = [
    *((f"u{bits}", "float", "bias") for bits in (2, 3, 8)),
    *(("i4", "float", ""), ("u4", "float", "zero"), ("u4", "float", "")),
    *(("e4m3", "float", ""), ("e2m1", "e8m0", ""), ("e2m1", "e4m3", "")),
]
ORDERS = [(1, 96, 16), (7, 544, 2), (300, 32, 2)]  # rows, columns, words of a lane


@starts_it
def test_interpreted_kernels():
    check_in_its_own_process(__file__, len(CASES) + len(ORDERS))


def random_rows(form, kind, offset) -> Rows:
    """`[8, 192]` in groups of 64; fp8 of floats with a scale for four rows."""
    rng = np.random.default_rng(0)
    rows_of_scale = 4 if (form, kind) == ("e4m3", "float") else 1
    shape = 8 // rows_of_scale, 3
    codes = rng.integers(0, 256, (8, 192 * BITS[form] // 8), dtype=np.uint8)
    if form == "e4m3":
        codes &= 0xBF  # no NaN
    scales = rng.uniform(0.5, 2, shape).astype(np.float32)
    if kind != "float":
        scales = rng.integers(100, 120, shape, dtype=np.uint8)
    offsets = rng.standard_normal(shape).astype(np.float32) if offset else None
    return Rows(
        jnp.asarray(codes),
        jnp.asarray(scales),
        None if offsets is None else jnp.asarray(offsets),
        format=form,
        columns=192,
        group=64,
        factors=jnp.arange(1.0, 9.0) if kind == "e4m3" else None,
        rows_of_scale=rows_of_scale,
        kind=kind,
        offset=offset,
        zero=8 if form == "u4" and not offset else 0,
    )


@alone
@pytest.mark.parametrize("form, kind, offset", CASES)
def test_whole_weights_and_rows(form, kind, offset):
    rows = random_rows(form, kind, offset)
    truth = by_formula(rows)
    with interpreted():
        whole = decoded(rows, jnp.float32)
        found = decoded(rows, jnp.float32, jnp.asarray([[7, -1], [8, 2]]))
    scale = np.abs(truth).max()
    np.testing.assert_allclose(whole, truth, rtol=2e-6, atol=2e-7 * scale)
    expected = np.stack([truth[7], 0 * truth[0], 0 * truth[0], truth[2]])
    found = np.asarray(found).reshape(4, -1)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-7 * scale)


@alone
@pytest.mark.parametrize("rows, columns, words", ORDERS)
def test_activations_in_the_order_of_lanes(rows, columns, words):
    """Zeros behind the last column, in no program what another row has."""
    x = np.arange(rows * columns, dtype=np.uint16).reshape(rows, columns)
    with interpreted():
        found = in_lane_order(jnp.asarray(x).view(jnp.bfloat16), words)
    found = np.asarray(found).view(np.uint16)
    np.testing.assert_array_equal(found, lanes.in_lane_order(x, words))
