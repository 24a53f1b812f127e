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
from jaxkern.triton.quant.several_products import Sizes, product
from tests.triton.quant import lanes
from tests.triton.quant.test_one_activation import launch_of, weights
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
    arrays = {"x_ptr": x, "tiles_ptr": tiles, "y_ptr": y}
    if residual is not None:
        arrays["residual_ptr"] = residual
    for place in np.ndindex(across, along):
        lanes.run(launch, arrays, (*map(int, place), 0))
    truth = x.astype(np.float64) @ decoded.T
    if residual is not None:
        truth = truth + residual
    error = np.linalg.norm(y.sum(0) - truth) / np.linalg.norm(truth)
    assert along == programs and error < 2e-6


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
