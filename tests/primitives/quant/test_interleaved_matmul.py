"""Interleaved rows: the bytes of the file in another order, and the ops on them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    GGUFTensor,
    dequantize,
    interleave,
    quantized_embedding,
    quantized_matmul,
    quantized_matmul_id,
)
from jaxkern.primitives.quant.interleaved_tensor import UNITS, rows_of
from jaxkern.testing.checks import bf16, case, f32, i32
from tests.primitives.quant.block_bytes import quiet_bytes, random_blocks, weight

CASES = {
    "dequantize_interleaved": [
        case(
            "q4_1",
            tiles=quiet_bytes(2, 2, 640),
            qtype="Q4_1",
            dtype=jnp.dtype(jnp.float32),
        ),
        case(
            "q8_0_row",
            tiles=quiet_bytes(544),
            qtype="Q8_0",
            dtype=jnp.dtype(jnp.bfloat16),
        ),
    ],
    "interleaved_matmul": [
        case("q4_1", x=f32(2, 2, 64), tiles=quiet_bytes(2, 640), qtype="Q4_1"),
        case("q8_0_vector", x=bf16(32), tiles=quiet_bytes(1, 544), qtype="Q8_0"),
        case("empty", x=f32(0, 32), tiles=quiet_bytes(2, 288), qtype="Q4_0"),
    ],
    "interleaved_embedding": [
        case(
            "q4_0",
            ids=i32(3, low=-1, high=34),
            tiles=quiet_bytes(2, 288),
            qtype="Q4_0",
            dtype=jnp.dtype(jnp.float32),
        ),
    ],
    "interleaved_matmul_id": [
        case(
            "q4_0",
            x=f32(2, 32),
            ids=i32(2, 2, low=-1, high=4),
            tiles=quiet_bytes(3, 1, 288),
            qtype="Q4_0",
        ),
    ],
}
for cases in CASES.values():
    for one in cases:
        if one.arguments.get("x") is not None:
            one.arguments["compute_dtype"] = None


@pytest.mark.parametrize(
    "qtype",
    [
        q if q in ("Q4_1", "Q3_K", "MXFP4") else pytest.param(q, marks=pytest.mark.full)
        for q in UNITS
    ],
)
def test_tiles_hold_the_bytes_of_the_file(qtype):
    blocks = random_blocks(qtype, 2, 32, 512)
    w = interleave(GGUFTensor(jnp.asarray(blocks), qtype))
    assert w.shape == (2, 32, 512)
    assert w.nbytes == blocks.nbytes
    back = rows_of(w.tiles, qtype).reshape(blocks.shape)
    np.testing.assert_array_equal(back, blocks)
    # the first unit of row 5 stands after those of rows 0 to 4
    unit = UNITS[qtype][0][0]
    first = np.asarray(w.tiles)[0, 0]
    np.testing.assert_array_equal(first[5 * unit : 6 * unit], blocks[0, 5, :unit])


def test_every_op_equals_that_on_the_blocks_of_the_file():
    w, values = weight("Q4_K", 3, 32, 256)
    tiles = interleave(w)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(4, 256)), jnp.float32)
    ids = jnp.array([0, 31, 32, -1, 17])
    experts = jnp.array([2, 0, 3, 1, -1, 1, 0, 0])
    np.testing.assert_array_equal(dequantize(tiles), dequantize(w))
    np.testing.assert_array_equal(
        quantized_embedding(ids, tiles[1]), quantized_embedding(ids, w[1])
    )
    y, expected = quantized_matmul(x, tiles[1]), np.asarray(x, float) @ values[1].T
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)
    routed = quantized_matmul_id(x, tiles, experts, top_k=2)
    expected = quantized_matmul_id(x, w, experts, top_k=2)
    np.testing.assert_allclose(routed, expected, rtol=1e-5, atol=1e-4)
    gradients = [
        jax.grad(lambda x, w=w: jnp.sum(jnp.sin(quantized_matmul(x, w))))(x)
        for w in (tiles[1], w[1])
    ]
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-4)


def test_errors():
    odd = GGUFTensor(jnp.zeros((17, 18), jnp.uint8), "Q4_0")
    with pytest.raises(TypeError, match=r"interleave: `w` must be .* multiple of 16"):
        interleave(odd)
    tiles = interleave(odd[:16])
    with pytest.raises(TypeError, match="dim `d` is 64 in `x` but 32 in `w`"):
        quantized_matmul(jnp.ones((1, 64)), tiles)
    with pytest.raises(TypeError, match="only the 1 leading dims"):
        tiles[0, 0]
