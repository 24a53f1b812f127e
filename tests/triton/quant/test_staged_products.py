"""Products of packed rows in stages: by lanes, and as machine code."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.triton.quant.several_products import product
from jaxkern.triton.quant.staged_products import (
    Stages,
    in_order_of_steps,
    stages_of,
)
from tests.triton.quant import lanes
from tests.triton.quant.test_one_activation import launch_of, weights
from tests.triton.test_every_kernel import packed

pytestmark = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)


@pytest.mark.parametrize(
    "qtype, k, rows, units, stages",
    [
        ("Q4_K", 1280, 21, 5, Stages(24, 1, 1, 3, 3, 4)),
        ("Q4_K", 1024, 9, 5, Stages(16, 2, 2, 2, 2, 8)),
        ("INT4_128_BF16", 2048, 11, 9, Stages(16, 4, 1, 2, 2)),
        ("INT4_128_BF16", 768, 33, 3, Stages(40, 1, 1, 4, 2, 4)),
        ("INT4_64_F16", 1024, 70, 5, Stages(64, 1, 2, 3, 2, 4)),
        ("AFFINE4_32_BF16", 512, 17, 2, Stages(24, 2, 1, 2, 2, 8)),
    ],
)
def test_lanes_give_the_product(qtype, k, rows, units, stages):
    """Rows, tiles and columns that nothing divides, several programs of each axis."""
    rng = np.random.default_rng(k)
    x = (rng.standard_normal((rows, k)) + 0.5).astype(ml_dtypes.bfloat16)
    w, decoded = weights(rng, qtype, 16 * units, k)
    tiles = np.asarray(w.tiles)
    residual = rng.standard_normal((rows, 16 * units)).astype(np.float32)
    residual = residual if stages.splits == 1 else None

    def multiply(x, tiles, residual):
        return product(x, tiles, qtype, stages, residual)

    launch = launch_of(multiply, jnp.asarray(x), jnp.asarray(tiles), residual)
    y = np.full((stages.splits, rows, 16 * units), np.nan, np.float32)
    ordered = np.asarray(in_order_of_steps(jnp.asarray(x), stages.columns))
    arrays = {"x_ptr": ordered, "tiles_ptr": tiles, "y_ptr": y}
    if residual is not None:
        arrays["residual_ptr"] = residual
    for place in np.ndindex(*launch.grid):
        lanes.run(launch, arrays, (*map(int, place), 0))
    truth = x.astype(np.float64) @ decoded.T
    plain = (
        x.astype(np.float64) @ decoded.astype(ml_dtypes.bfloat16).astype(np.float64).T
    )
    if residual is not None:
        truth, plain = truth + residual, plain + residual
    size = np.linalg.norm(truth)
    error, of_bfloat16 = (
        np.linalg.norm(a.astype(ml_dtypes.bfloat16).astype(np.float64) - truth) / size
        for a in (y.sum(0), plain)
    )
    assert error < 1.5 * of_bfloat16


@pytest.mark.parametrize(
    "qtype, rows, f, k",
    [
        ("INT4_128_BF16", 16, 8192, 8192),
        ("Q4_K", 64, 28672, 4096),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                ("INT4_128_BF16", 32, 8192, 8192),
                ("INT4_64_BF16", 64, 4096, 4096),
                ("AFFINE4_64_BF16", 50, 8192, 8192),
                ("AFFINE4_32_BF16", 9, 28672, 8192),
                ("Q4_K", 33, 28672, 8192),
            ]
        ),
    ],
)
def test_products_overlap_and_nothing_spills(qtype, rows, f, k):
    """Products that the assembler awaits one by one have an arrival for each."""
    tiles: Any = packed(qtype, f, k).tiles
    x: Any = jax.ShapeDtypeStruct((rows, k), jnp.bfloat16)
    with compiling_for(90):
        stages = stages_of(x, tiles, qtype)
        assert stages is not None
        launch = launch_of(lambda x, w: product(x, w, qtype, stages), x, tiles)
        assert launch.name == "staged_activations_kernel" and launch.stack_bytes <= 32
        assert launch.dynamic_bytes <= bridge.max_shared_bytes()
        assert launch.sass.count("HGMMA") == 16
        assert launch.sass.count("WARPGROUP.ARRIVE") == 4


@pytest.mark.parametrize(
    "rows, f, k, chosen",
    [
        (16, 8192, 8192, Stages(16, 4, 1, 2, 3)),
        (17, 8192, 8192, Stages(24, 4, 1, 2, 3)),
        (32, 8192, 8192, Stages(32, 4, 1, 2, 2)),
        (64, 8192, 8192, Stages(64, 2, 2, 2, 2)),
        (64, 8192, 256, Stages(64, 1, 1, 4, 2)),
        (8, 8192, 8192, None),
        (65, 8192, 8192, None),
        (16, 8192, 8320, None),
    ],
)
def test_what_was_measured_is_chosen(rows, f, k, chosen):
    tiles: Any = packed("INT4_128_BF16", f, k).tiles
    x: Any = jax.ShapeDtypeStruct((rows, k), jnp.bfloat16)
    with compiling_for(90):
        assert stages_of(x, tiles, "INT4_128_BF16") == chosen
    with compiling_for(80):
        assert stages_of(x, tiles, "INT4_128_BF16") is None


def test_long_scales_need_enough_rows():
    x: Any = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16)
    found = []
    with compiling_for(90):
        for f in (28672, 14336):
            tiles: Any = packed("Q4_K", f, 4096).tiles
            found.append(stages_of(x, tiles, "Q4_K"))
    assert found == [Stages(64, 1, 1, 4, 2), None]
