"""Triton's grouped products: in the interpreter, and compiled for two machines."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import explain, grouped_matmul
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.launch import compiled
from jaxkern.gpu.moe.row_tiles import GROUP, ROW, START, STOP, row_tiles
from jaxkern.pallas.moe import grouped_matmul as hopper
from jaxkern.triton.moe import grouped_matmul as kernels
from tests.primitives.moe.test_grouped_matmul import loop
from tests.triton.interpreted import (
    INTERPRETED,
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

CASES = [
    ([70, 0, 5, 130], 220, 72, 40),
    ([1, 0, 3, 0, 2, 1, 1], 9, 33, 50),  # low tiles, a row left over
    ([0, 0, 0], 5, 16, 16),
    ([0, 900], 40, 130, 20),  # more than there are
]


@starts_it
def test_interpreted_kernels():
    check_in_its_own_process(__file__, len(CASES))


@alone
@pytest.mark.parametrize("group_sizes, r, f, d", CASES)
def test_products_and_gradients(group_sizes, r, f, d):
    rng = np.random.default_rng(r)
    shapes = (r, d), (len(group_sizes), f, d), (r, f)
    x, w, dy = (jnp.asarray(rng.standard_normal(s), jnp.float16) for s in shapes)
    sizes = jnp.asarray(group_sizes, jnp.int32)
    with interpreted():
        y = kernels.grouped_matmul(x, w, sizes)
        dx, dw = kernels.grouped_matmul_bwd(x, w, sizes, dy)
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    value, groups = loop(x, w, group_sizes)
    slopes = np.zeros_like(x), np.zeros_like(w)
    for g, rows in enumerate(groups):
        slopes[0][rows], slopes[1][g] = dy[rows] @ w[g], dy[rows].T @ x[rows]
    for found, truth in zip((y, dx, dw), (value, *slopes), strict=True):
        found = np.asarray(found, np.float64)
        assert np.linalg.norm(found - truth) <= 2.0**-11 * np.linalg.norm(truth)
        np.testing.assert_array_equal(found[truth == 0], 0)


@starts_it
@pytest.mark.parametrize("block, align", [(16, 1), (128, 8)])
def test_tiles_hold_every_row_once(block, align):
    rng = np.random.default_rng(block)
    for r, e in [(1, 1), (7, 40), (500, 3), (1000, 64)]:
        sizes = rng.multinomial(r, rng.dirichlet(np.full(e + 1, 0.3)))[:e]
        if r == 500:
            sizes = np.asarray([300, 0, 400])  # more than there are
        table, count = row_tiles(jnp.asarray(sizes), r, block, align)
        group_of = np.full(r, e)
        for g, end in reversed(list(enumerate(np.minimum(np.cumsum(sizes), r)))):
            group_of[:end] = g
        held = np.zeros(r, int)
        assert count[0] <= len(table)
        for tile in np.asarray(table)[: int(count[0])]:
            assert tile[ROW] % align == 0
            assert tile[ROW] <= tile[START] < tile[STOP] <= tile[ROW] + block
            held[tile[START] : tile[STOP]] += 1
            assert (group_of[tile[START] : tile[STOP]] == tile[GROUP]).all()
        assert (held == 1).all()


def slopes(x, w, group_sizes):
    y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, group_sizes), x, w)
    return y, pull(y)


@starts_it
@pytest.mark.full
@pytest.mark.skipif(bridge.missing() is not None, reason="triton is not installed")
@pytest.mark.parametrize("capability", [80, 86, 90])
@pytest.mark.parametrize("r", [8, 100, 4096])
def test_kernels_compile_and_fit(capability, r):
    shapes = (r, 256), (8, 520, 256)
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    with compiling_for(capability):
        rows: Any = explain(slopes, x, w, sizes, platform="cuda").rows
        launches = [launch for row in rows for launch in row.launches]
        assert len(launches) == 3
        for launch in launches:
            assert compiled(launch, capability).asm["cubin"]
            assert launch.stack_bytes == 0
            assert launch.shared_bytes <= bridge.max_shared_bytes()


@pytest.mark.skipif(INTERPRETED, reason="nothing to interpret")
def test_another_dtype_of_the_result_is_refused_in_words():
    """By the kernels of both backends: they round to the dtype of x."""
    x, w = jnp.ones((64, 256), jnp.bfloat16), jnp.ones((2, 256, 256), jnp.bfloat16)

    def f(x, w):
        sizes = jnp.array([30, 34])
        return grouped_matmul(x, w, sizes, preferred_element_type=jnp.float32)

    [row] = explain(f, x, w, platform="cuda").rows
    assert row.runs.startswith("xla")
    reason = "`preferred_element_type`: the kernels round to the dtype of x"
    assert reason in row.refused[-1]
    options = dict(preferred_element_type=jnp.dtype("float32"))
    assert hopper.unsupported(x, w, **options) == reason
