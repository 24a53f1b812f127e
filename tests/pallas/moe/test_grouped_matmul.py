"""The Hopper kernels of grouped products on a machine without a GPU.

The interpreter keeps the index of a tile in a dim of one tile, which Mosaic drops: dims
of 64 are right here and were wrong on a GPU, so `unsupported` is what is tested.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import explain, grouped_matmul
from jaxkern.gpu.device import compiling_for
from jaxkern.pallas.moe import grouped_matmul as hopper
from jaxkern.pallas.moe.problem import place
from tests.primitives.moe.test_grouped_matmul import loop

RNG = np.random.default_rng(0)


def draw(r, e, f, d, dtype):
    shapes = (r, d), (e, f, d), (r, f)
    return [jnp.asarray(RNG.standard_normal(s), dtype) for s in shapes]


def interpreted(x, w, group_sizes, dy):
    sizes = jnp.asarray(group_sizes, jnp.int32)
    y = hopper.grouped_matmul(x, w, sizes, interpret=True)
    return y, *hopper.grouped_matmul_bwd(x, w, sizes, dy, interpret=True)


def expected(x, w, group_sizes, dy):
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, groups = loop(x, w, group_sizes)
    dx, dw = np.zeros_like(x), np.zeros_like(w)
    for g, rows in enumerate(groups):
        dx[rows], dw[g] = dy[rows] @ w[g], dy[rows].T @ x[rows]
    return y, dx, dw


@pytest.mark.parametrize(
    "group_sizes, r, f, d, dtype",
    [
        ([70, 0, 5, 130], 220, 192, 128, "bfloat16"),  # rows left over, odd edges
        pytest.param([64, 128], 192, 128, 320, "float16", marks=pytest.mark.full),
        pytest.param([0, 0, 300], 200, 320, 128, "bfloat16", marks=pytest.mark.full),
        pytest.param([1] * 9, 9, 128, 128, "bfloat16", marks=pytest.mark.full),
        pytest.param([0, 0], 130, 128, 128, "bfloat16", marks=pytest.mark.full),
    ],
)
def test_products_and_gradients(monkeypatch, group_sizes, r, f, d, dtype):
    monkeypatch.setattr(hopper, "num_sms", lambda: 3)
    x, w, dy = draw(r, len(group_sizes), f, d, dtype)
    found = interpreted(x, w, group_sizes, dy)
    step = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    for y, truth in zip(found, expected(x, w, group_sizes, dy), strict=True):
        y = np.asarray(y, np.float64)
        assert y.shape == truth.shape
        assert np.linalg.norm(y - truth) <= step * np.linalg.norm(truth)
        np.testing.assert_array_equal(y[truth == 0], 0)


@pytest.mark.full
def test_what_is_not_finite_stays_in_its_group(monkeypatch):
    """Tiles and blocks hold rows of two groups: only a mask keeps them apart."""
    monkeypatch.setattr(hopper, "num_sms", lambda: 2)
    group_sizes = [21, 30, 13]
    x, w, dy = draw(70, 3, 128, 128, "bfloat16")
    x, dy = (a.at[21:51].set(jnp.nan).at[64:].set(jnp.nan) for a in (x, dy))
    results: Any = interpreted(x, w, group_sizes, dy)
    y, dx, dw = results
    for rows in (y, dx):
        finite = np.isfinite(np.asarray(rows, np.float32))
        assert finite[:21].all() and finite[51:].all() and not finite[21:51].any()
    assert jnp.isfinite(dw[0]).all() and jnp.isfinite(dw[2]).all()
    assert not jnp.isfinite(dw[1]).any()


def test_every_tile_is_taken_once():
    for rows, columns in [(1, 1), (5, 3), (4, 8), (7, 19), (3, 24)]:
        taken = {
            tuple(map(int, place(jnp.int32(i), jnp.int32(rows), columns)))
            for i in range(rows * columns)
        }
        assert taken == {(i, j) for i in range(rows) for j in range(columns)}


def slopes(x, w, group_sizes):
    def loss(x, w):
        return grouped_matmul(x, w, group_sizes).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1))(x, w)


def shapes(r=4096, e=8, f=512, d=256, dtype="bfloat16"):
    spec = jax.ShapeDtypeStruct
    return spec((r, d), dtype), spec((e, f, d), dtype), spec((e,), jnp.int32)


def test_it_runs_where_it_fits():
    with compiling_for(90):
        assert "mosaic_gpu: pallas.moe" in str(
            explain(grouped_matmul, *shapes(), platform="cuda")
        )
        narrow = str(explain(grouped_matmul, *shapes(f=96), platform="cuda"))
        assert "not of multiples of 64" in narrow and "triton: triton.moe" in narrow
        single = str(explain(grouped_matmul, *shapes(f=64), platform="cuda"))
        assert "a single tile of 64" in single and "triton: triton.moe" in single
        few = str(explain(grouped_matmul, *shapes(r=64), platform="cuda"))
        assert "fewer than 32 for each group" in few
        wide = str(explain(grouped_matmul, *shapes(dtype="float32"), platform="cuda"))
        assert "runs xla" in wide and "`x` is float32" in wide
    with compiling_for(80):
        assert "not 90" in str(explain(grouped_matmul, *shapes(), platform="cuda"))


@pytest.mark.full
def test_it_lowers_for_hopper_also_under_vmap():
    with compiling_for(90):
        x, w, sizes = shapes()
        traced = jax.jit(slopes).trace(x, w, sizes)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("@mosaic_gpu") == 2  # the value is not wanted
        many = jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
        traced = jax.jit(jax.vmap(grouped_matmul, (0, None, None))).trace(
            many, w, sizes
        )
        assert "@mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
