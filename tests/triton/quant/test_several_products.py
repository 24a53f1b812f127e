"""Products of packed rows with 2 to 384 activations: by lanes, and as machine code."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.triton.quant import several_products
from jaxkern.triton.quant.block_codes import BYTES
from jaxkern.triton.quant.column_order import is_exchanged
from jaxkern.triton.quant.several_products import Sizes, product, wide_product
from tests.triton.quant import lanes
from tests.triton.quant.test_one_activation import launch_of, launches_of, weights
from tests.triton.test_every_kernel import packed

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)


@pytest.mark.parametrize(
    "qtype, k, rows, units, sizes",
    [
        ("Q4_K", 768, 3, 3, Sizes(False, 8, 2, 1)),
        ("Q4_K", 1280, 11, 2, Sizes(False, 16, 4, 3)),
        ("Q5_K", 512, 9, 1, Sizes(False, 8, 2, 1)),
        ("Q6_K", 768, 2, 1, Sizes(False, 8, 2, 2)),
        ("Q8_0", 544, 5, 2, Sizes(False, 8, 2, 1)),
        ("Q4_0", 96, 20, 1, Sizes(False, 16, 1, 1)),
        ("NVFP4_256", 512, 3, 1, Sizes(False, 8, 2, 1)),
        ("AFFINE4_64_BF16", 320, 9, 1, Sizes(False, 16, 1, 1)),
        ("Q4_K", 768, 11, 3, Sizes(True, 32, 8, 1)),
        ("Q6_K", 1280, 70, 3, Sizes(True, 64, 4, 3)),
        ("NVFP4_256", 512, 130, 2, Sizes(True, 128, 4, 1)),
    ],
)
def test_lanes_give_the_product(qtype, k, rows, units, sizes):
    """Rows, tiles and columns that nothing divides, several programs of each axis."""
    rng = np.random.default_rng(k)
    x = rng.standard_normal((rows, k)) + 0.5
    x = x.astype(ml_dtypes.bfloat16)
    w, decoded = weights(rng, qtype, 16 * units, k)
    tiles = np.asarray(w.tiles)
    programs = sizes.splits
    residual = rng.standard_normal((rows, 16 * units)).astype(np.float32)
    residual = residual if programs == 1 else None

    def multiply(x, tiles, residual):
        return product(x, tiles, qtype, sizes, residual)

    launch = launch_of(multiply, jnp.asarray(x), jnp.asarray(tiles), residual)
    across, along, *_ = (*launch.grid, 1)
    y = np.full((along, rows, 16 * units), np.nan, np.float32)
    ordered = lanes.in_lane_order(x, 2) if sizes.decoded else x
    arrays = {"x_ptr": ordered, "tiles_ptr": tiles, "y_ptr": y}
    if residual is not None:
        arrays["residual_ptr"] = residual
    for place in np.ndindex(across, along):
        lanes.run(launch, arrays, (*map(int, place), 0))
    truth = x.astype(np.float64) @ decoded.T
    if residual is not None:
        truth = truth + residual
    error = np.linalg.norm(y.sum(0) - truth) / np.linalg.norm(truth)
    assert along == programs and error < (4e-3 if sizes.decoded else 2e-6)


@pytest.mark.parametrize(
    "qtype, k, rows, units, columns, warps, programs",
    [
        ("Q4_K", 768, 20, 5, 8, 2, 2),
        ("Q6_K", 1280, 50, 3, 8, 1, 5),
        ("INT4_128_BF16", 640, 130, 16, 128, 4, 3),
        ("Q8_0", 544, 257, 3, 256, 8, 1),
        ("Q5_0", 64, 9, 3, 8, 8, 2),
        ("NVFP4_256", 512, 16, 4, 8, 1, 4),
    ],
)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_lanes_give_wide_products(
    qtype, k, rows, units, columns, warps, programs, dtype
):
    """Several tiles a program, sizes that nothing divides."""
    rng = np.random.default_rng(k)
    x = rng.standard_normal((rows, k)).astype(ml_dtypes.bfloat16)
    w, decoded = weights(rng, qtype, 16 * units, k)
    tiles, residual = np.asarray(w.tiles), rng.standard_normal((rows, 16 * units))
    residual = residual.astype(np.float32)
    sizes = {"columns": columns, "warps": warps, "programs": programs}

    def multiply(x, tiles, residual):
        return wide_product(x, tiles, qtype, residual, dtype, **sizes)

    *_, launch = launches_of(multiply, jnp.asarray(x), jnp.asarray(tiles), residual)
    arrays = {
        "x_ptr": x if is_exchanged(qtype) else lanes.in_lane_order(x, 2),
        "tiles_ptr": tiles,
        "residual_ptr": residual,
        "y_ptr": np.full((rows, 16 * units), np.nan, dtype),
    }
    assert launch.grid[0] <= programs
    for program in range(launch.grid[0]):
        lanes.run(launch, arrays, (program, 0))
    truth = x.astype(np.float64) @ decoded.T + residual
    error = np.linalg.norm(arrays["y_ptr"] - truth) / np.linalg.norm(truth)
    assert error < 4e-3


EXCHANGED = ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_NL"]
EXCHANGED += ["IQ4_XS", "MXFP4", "NVFP4_256", "AFFINE4_32_F16", "INT4_128_BF16"]


@pytest.mark.parametrize("qtype", EXCHANGED)
def test_lanes_have_the_columns_that_wgmma_expects(qtype):
    """Activations of a one each: what comes is the weights, each at its column."""
    x = np.eye(256, dtype=ml_dtypes.bfloat16)
    w, decoded = weights(np.random.default_rng(0), qtype, 16, 256)
    launch = launch_of(
        lambda x, tiles: wide_product(x, tiles, qtype, dtype=jnp.float32, programs=1),
        *(jnp.asarray(x), w.tiles),
    )
    y = np.full((256, 16), np.nan, np.float32)
    arrays = {"x_ptr": x, "tiles_ptr": np.asarray(w.tiles), "y_ptr": y}
    lanes.run(launch, arrays, (0, 0))
    largest = np.abs(decoded).max()
    np.testing.assert_allclose(y.T, decoded, atol=largest / 100)


@pytest.mark.parametrize(
    "qtype, rows",
    [
        ("Q4_K", 16),
        ("Q6_K", 64),
        ("Q4_K", 384),
        *(
            pytest.param(qtype, rows, marks=pytest.mark.full)
            for qtype in BYTES
            for rows in (9, 32, 64, 384)
        ),
    ],
)
def test_nothing_spills_on_hopper(qtype, rows):
    tiles: Any = packed(qtype, 4096, 4096).tiles
    x = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16)
    with compiling_for(90):
        sizes = several_products.sizes_of(rows, 4096, tiles.shape[0], 1)
        launch = launch_of(lambda x, w: product(x, w, qtype, sizes), x, tiles)
        assert launch.stack_bytes <= 96 and sizes.decoded == (rows > 16)
        assert ("HGMMA" in launch.sass) == sizes.decoded


def test_no_copy_is_on_its_way_where_sums_go():
    """Copies of nothing, behind the last step, are awaited before memory is reused."""
    tiles: Any = packed("Q4_K", 4096, 4096).tiles
    x: Any = jax.ShapeDtypeStruct((32, 4096), jnp.bfloat16)
    with compiling_for(90):
        sizes = several_products.sizes_of(32, 4096, tiles.shape[0], 1)
        launch = launch_of(lambda x, w: product(x, w, "Q4_K", sizes), x, tiles)
        assert launch.name == "many_activations_kernel"
        behind = launch.sass.rpartition("LDGSTS")[2]
    assert "DEPBAR.LE SB0, 0x0;" in behind.partition("STS")[0]


@pytest.mark.parametrize("qtype", ["INT4_128_BF16", "Q4_K"])
def test_the_loop_of_wide_products_spills_nothing(qtype):
    tiles: Any = packed(qtype, 4096, 4096).tiles
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    *_, launch = launches_of(
        lambda x, w: wide_product(x, w, qtype, programs=132), x, tiles
    )
    with compiling_for(90):
        _, *between, _ = launch.sass.split("HGMMA.64x256x16")
    assert len(between) == 15  # four of 16 columns for each of four slabs
    assert not any("LDL" in part or "STL" in part for part in between)


def test_who_multiplies_how_many():
    def chosen(rows, f, k, qtype="Q4_K"):
        sizes = f // 16, k
        if not several_products.is_read_packed(rows, 1, *sizes, qtype):
            return "written"
        wide = several_products.is_wide(rows, *sizes, qtype)
        return "wide" if wide else "narrow"

    with compiling_for(90):
        found = [chosen(rows, 28672, 8192) for rows in (128, 256, 512, 1024, 4096)]
        assert found == ["narrow", "wide", "wide", "wide", "written"]
        # as many tiles as half of the multiprocessors: these share the columns
        assert chosen(256, 4096, 4096) == "narrow"
        assert chosen(512, 8192, 8192, "INT4_128_BF16") == "wide"
    with compiling_for(86):
        assert chosen(64, 28672, 8192) == "narrow"
        assert chosen(65, 28672, 8192) == "written"
