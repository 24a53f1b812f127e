"""Which rows of the norms are split over programs, and which are left to XLA."""

import jax
import pytest

from jaxkern.gpu.device import compiling_for
from jaxkern.triton.norm import (
    gated_rms_norm,
    layer_norm,
    rms_norm,
    rms_norm_add,
    rms_norm_mul,
    split_rows,
)


def rows_of(n, d, dtype="bfloat16"):
    return jax.ShapeDtypeStruct((n, d), dtype)


@pytest.mark.parametrize(
    ("x", "forward", "backward"),  # programs a row
    [
        (rows_of(1, 4096), 1, 4),
        (rows_of(256, 7168), 1, 1),
        (rows_of(265, 7168), None, None),
        (rows_of(65, 16384), 2, 2),
        (rows_of(128, 16384), None, None),
        (rows_of(4, 50257), 7, 7),
        (rows_of(65, 32768), 4, None),
        (rows_of(256, 17398), None, None),
        (rows_of(131, 8190), None, 1),
        (rows_of(8192, 1024), None, None),
        (rows_of(1, 65530), None, 8),
        (rows_of(40, 2048, "float32"), 1, None),
        (rows_of(65, 7168, "float32"), 2, 2),
        (rows_of(40, 17398, "float32"), None, None),
        (rows_of(256, 16384, "float32"), None, None),
    ],
)
def test_rows_that_are_split(x, forward, backward):
    with compiling_for(90):
        sizes, walk = split_rows.split_sizes(x), split_rows.split_walk(x)
    assert (sizes and sizes["CLUSTER"]) == forward
    assert (walk and walk["CLUSTER"]) == backward
    with compiling_for(80):
        assert split_rows.split_sizes(x) is split_rows.split_walk(x) is None


def test_many_rows_that_are_split():
    with compiling_for(90):
        assert split_rows.split_sizes(rows_of(8192, 5001)) is None
        sizes = split_rows.split_sizes(rows_of(8192, 5001), several=True)
        assert sizes and (sizes["CLUSTER"], sizes["VECTOR"]) == (1, 8)
        walk = split_rows.split_walk(rows_of(640, 16384, "float32"), centred=True)
        assert walk and walk["PROGRAMS"] == 66


@pytest.mark.parametrize(
    ("module", "x", "forward", "backward"),  # whether XLA is faster
    [
        (rms_norm, rows_of(1, 2227), False, False),
        (rms_norm, rows_of(4, 2048), False, True),
        (rms_norm, rows_of(128, 7168), False, False),
        (rms_norm, rows_of(65, 32768), False, True),
        (rms_norm, rows_of(128, 50257), True, True),
        (rms_norm, rows_of(16384, 2227), True, False),
        (rms_norm, rows_of(16384, 4096), False, False),
        (layer_norm, rows_of(40, 2048, "float32"), True, True),
        (layer_norm, rows_of(640, 50257, "float32"), False, False),
        (rms_norm_add, rows_of(640, 50257), True, False),
        (rms_norm_add, rows_of(4, 50257), False, True),
        (rms_norm_add, rows_of(16, 50257), True, True),
        (gated_rms_norm, rows_of(65, 7168), False, False),
        (gated_rms_norm, rows_of(65, 62592), False, True),
        (rms_norm_mul, rows_of(2, 17398), False, True),
        (rms_norm_mul, rows_of(4, 50257), False, True),
    ],
)
def test_rows_that_xla_is_faster_for(module, x, forward, backward):
    with compiling_for(90):
        reasons = module.slower(x), module.slower(x, dy=x)
    text = f"having {x.shape[0]} rows of {x.shape[1]} columns"
    assert reasons == (text if forward else None, text if backward else None)


def test_short_rows_of_the_sum_are_left_where_they_are_not_split():
    with compiling_for(90):
        assert rms_norm_add.slower(rows_of(128, 2227)) is None
        assert "idle" in str(rms_norm_add.slower(rows_of(4096, 2227)))
