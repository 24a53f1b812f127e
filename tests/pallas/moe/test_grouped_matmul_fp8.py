"""The Hopper kernel of grouped products in 8 bits on a machine without a GPU."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkern import FP8Tensor, explain, grouped_matmul_fp8
from jaxkern.gpu.device import compiling_for
from jaxkern.pallas.moe import grouped_matmul
from jaxkern.pallas.moe import grouped_matmul_fp8 as hopper
from tests.primitives.moe.test_grouped_matmul import loop

RNG = np.random.default_rng(0)
NAN = 0x7F  # of e4m3fn


def draw(r, e, f, d):
    """Codes of both signs, up to 1, and scales of rows."""
    x, w = (RNG.integers(0x08, 0x39, s, np.uint8) for s in ((r, d), (e, f, d)))
    signs = [RNG.integers(0, 2, a.shape, np.uint8) << 7 for a in (x, w)]
    scales = [np.float32(RNG.uniform(0.1, 2, s)) for s in ((r,), (e, f))]
    return x | signs[0], scales[0], w | signs[1], scales[1]


def decoded(codes, scale):
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return values * scale[..., None].astype(np.float64)


def interpreted(operands, group_sizes, dtype):
    return hopper.scaled_grouped_matmul(
        *map(jnp.asarray, operands),
        jnp.asarray(group_sizes, jnp.int32),
        preferred_element_type=jnp.dtype(dtype),
        interpret=True,
    )


@pytest.mark.parametrize(
    "group_sizes, r, f, d, dtype",
    [
        ([70, 0, 5], 80, 128, 192, "bfloat16"),  # rows left over, half a step
        pytest.param([7, 70], 80, 192, 320, "bfloat16", marks=pytest.mark.full),
        pytest.param([64, 128], 192, 320, 128, "float32", marks=pytest.mark.full),
        pytest.param([0, 0, 300], 200, 576, 256, "float16", marks=pytest.mark.full),
        pytest.param([1] * 9, 9, 128, 320, "bfloat16", marks=pytest.mark.full),
        pytest.param([0, 0], 130, 128, 128, "bfloat16", marks=pytest.mark.full),
    ],
)
def test_products_and_what_belongs_to_no_group(
    monkeypatch, group_sizes, r, f, d, dtype
):
    """Codes and scales behind the groups, and the scales of a row, are NaN."""
    monkeypatch.setattr(grouped_matmul, "num_sms", lambda: 2)
    x, x_scale, w, w_scale = draw(r, len(group_sizes), f, d)
    expected, _ = loop(decoded(x, x_scale), decoded(w, w_scale), group_sizes)
    behind = slice(sum(group_sizes), None)
    x[behind], x_scale[behind] = NAN, np.nan
    y = interpreted((x, x_scale, w, w_scale), group_sizes, dtype)
    assert y.shape == expected.shape and y.dtype == dtype
    y = np.asarray(y, np.float64)
    step = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 1e-6}[dtype]
    assert np.linalg.norm(y - expected) <= step * np.linalg.norm(expected)
    np.testing.assert_array_equal(y[behind], 0)


@pytest.mark.full
def test_what_is_not_finite_stays_in_its_row_and_its_group(monkeypatch):
    monkeypatch.setattr(grouped_matmul, "num_sms", lambda: 2)
    group_sizes = [21, 30, 13]
    x, x_scale, w, w_scale = draw(70, 3, 128, 128)
    x[3], x_scale[22], w[2, 5, 7], w_scale[2, 9] = NAN, np.inf, NAN, np.nan
    y = np.asarray(interpreted((x, x_scale, w, w_scale), group_sizes, "float32"))
    expected = np.zeros(y.shape, bool)
    expected[3], expected[22], expected[51:64, [5, 9]] = True, True, True
    np.testing.assert_array_equal(~np.isfinite(y), expected)
    np.testing.assert_array_equal(y[64:], 0)


def shapes(r=4096, e=8, f=512, d=256, block=(1, 0), x="bfloat16"):
    spec = jax.ShapeDtypeStruct
    scales = spec((e, f if block[0] else 1, 1), "float32")
    w = FP8Tensor(spec((e, f, d), "uint8"), scales, block)
    return spec((r, d), x), w, spec((e,), jnp.int32)


def test_it_runs_where_it_fits():
    def says(**options):
        operands = shapes(**options)
        return str(explain(grouped_matmul_fp8, *operands, platform="cuda"))

    with compiling_for(90):
        assert "mosaic_gpu: pallas.moe.grouped_matmul_fp8" in says(block=(0, 0))
        assert "mosaic_gpu: pallas.moe.grouped_matmul_fp8" in says(r=3, x="float32")
        assert "not of multiples of 64" in says(d=144)
        assert "a single tile of 64" in says(d=64)
    with compiling_for(89):
        assert "89, not 90 (Hopper)" in says()


@pytest.mark.parametrize("d", [256, pytest.param(320, marks=pytest.mark.full)])
def test_it_lowers_for_hopper(d):
    """With bytes outside of the kernel, which XLA need not copy, and e4m3 inside."""
    with compiling_for(90):
        traced = jax.jit(grouped_matmul_fp8).trace(*shapes(d=d))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    [call] = [line for line in text.splitlines() if "@mosaic_gpu" in line]
    assert "f8E4M3FN" not in call.split(" : ")[-1]
    assert call.split(" : ")[-1].count("xui8>") == 2


@pytest.mark.full
def test_it_lowers_under_vmap():
    x, w, sizes = shapes()
    many = jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
    with compiling_for(90):
        traced = jax.jit(jax.vmap(grouped_matmul_fp8, (0, None, None))).trace(
            many, w, sizes
        )
        assert "@mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
