"""Triton's top_k of short rows, in the interpreter and compiled for two machines."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import explain, top_k
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.launch import compiled
from jaxkern.triton.index import few_largest, short_rows
from tests.triton.interpreted import (
    alone,
    call,
    check_in_its_own_process,
    interpreted,
    starts_it,
    without_layouts,
)

CASES = [
    (9, 128, 8, "float32"),
    (5, 200, 6, "bfloat16"),
    (3, 511, 6, "float32"),  # by groups, and no row begins at 16 bytes
    (4, 700, 16, "float32"),
    (2, 1000, 7, "float16"),
    (3, 3, 3, "float32"),
    (1, 4095, 16, "float32"),
]
BY_WARPS = [  # some warps of the last program have the last row again
    (9, 512, 6, "float32"),  # three elements in a lane
    (6, 256, 8, "float32"),  # two
    (5, 300, 8, "float32"),
    (6, 256, 3, "bfloat16"),
    (3, 128, 1, "float16"),
]


def special_rows(rows, v, dtype):
    """Ties, both zeros, infinities and NaN among the largest."""
    rng = np.random.default_rng([rows, v])
    x = np.round(rng.standard_normal((rows, v)) * 3) / 2
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0]
    for i, value in enumerate(special[: max(0, v - 3)]):
        x[i % rows, rng.integers(0, v, 2)] = value
    x[-1] = -np.inf if v > 3 else x[-1]  # nothing is larger than what is masked out
    return jnp.asarray(x, dtype)


@starts_it
def test_interpreted_kernels():
    check_in_its_own_process(__file__, len(CASES) + len(BY_WARPS))


def check(x, k, values, indices):
    wide = np.asarray(x, np.float64)
    rank = np.where(np.isnan(wide), np.inf, wide)
    places = np.broadcast_to(np.arange(x.shape[1]), x.shape)
    order = np.lexsort((places, -rank, ~np.isnan(wide)))
    np.testing.assert_array_equal(indices, order[:, :k])
    np.testing.assert_array_equal(
        np.asarray(values, np.float64), np.take_along_axis(wide, order[:, :k], -1)
    )


@alone
@pytest.mark.parametrize("rows, v, k, dtype", CASES)
def test_top_k(monkeypatch, rows, v, k, dtype):
    x = special_rows(rows, v, dtype)
    monkeypatch.setattr(short_rows, "triton_call", call)
    with interpreted():
        found = short_rows.top_k_of_short_rows(x, k)
    check(x, k, *found)


@alone
@pytest.mark.parametrize("rows, v, k, dtype", BY_WARPS)
def test_a_warp_for_each_row(monkeypatch, rows, v, k, dtype):
    x = special_rows(rows, v, dtype)
    monkeypatch.setattr(short_rows, "triton_call", call)
    monkeypatch.setattr(few_largest, "MANY_ROWS", rows)
    with interpreted(), without_layouts(short_rows, few_largest):
        found = short_rows.top_k_of_short_rows(x, k)
    check(x, k, *found)


@starts_it
@pytest.mark.skipif(bridge.missing() is not None, reason="triton is not installed")
@pytest.mark.parametrize(
    "rows, v, k, dtype, name",
    [
        (16384, 512, 6, "float32", "by_groups_kernel"),
        (8192, 128, 8, "bfloat16", "by_groups_kernel"),
        (1, 512, 6, "float32", "by_groups_kernel"),
        (1024, 256, 8, "float32", "all_together_kernel"),
    ],
)
def test_kernels_compile_and_fit(rows, v, k, dtype, name):
    x = jax.ShapeDtypeStruct((rows, v), dtype)
    for capability in (80, 90):
        with compiling_for(capability):
            found: Any = explain(lambda x: top_k(x, k), x, platform="cuda").rows
            [launch] = found[0].launches
            assert launch.name == name
            assert compiled(launch, capability).asm["cubin"]
            assert launch.stack_bytes == 0


@starts_it
def test_many_of_a_short_row_are_left_to_xla():
    x = jax.ShapeDtypeStruct((64, 512), "float32")
    refused = str(explain(lambda x: top_k(x, 17), x, platform="cuda"))
    assert "more than 16 of a row of only 512" in refused
