"""Interleaved rows: the bytes of the file in another order, and the ops on them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    AffineTensor,
    GGUFTensor,
    IntTensor,
    MicroscaledTensor,
    dequantize,
    interleave,
    quantized_embedding,
    quantized_matmul,
    quantized_matmul_id,
)
from jaxkern.primitives.quant.block_formats import KERNEL_FORMATS
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
        for q in KERNEL_FORMATS
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


FULL = pytest.mark.full


def numbers(rng, dtype, *shape):
    return jnp.asarray(rng.uniform(0.5, 1.5, shape), dtype)


def four_bits(kind, group, dtype):
    """Weights `[2, 32, 512]` of 4 bits with every code; a container."""
    rng = np.random.default_rng(0)
    rows, groups = (2, 32), 512 // group
    codes = jnp.asarray(rng.integers(0, 256, (*rows, 256), np.uint8))
    if kind in ("mxfp4", "nvfp4"):
        # all of NVFP4, of MXFP4 those of weights that are normal numbers
        least, last = (2, 255) if kind == "mxfp4" else (0, 256)
        scales = jnp.asarray(rng.integers(least, last, (*rows, groups), np.uint8))
        factor = numbers(rng, jnp.float32, 2) if kind == "nvfp4" else None
        return MicroscaledTensor(codes, scales, factor, kind)
    scales, other = (numbers(rng, dtype, *rows, groups) for _ in range(2))
    if kind == "affine":
        return AffineTensor(codes.view(jnp.uint32), scales, other, 4, group)
    zeros = None if kind.endswith("alone") else jnp.round(8 * other)
    signed = kind.startswith("int")
    return IntTensor(codes, scales, zeros, bits=4, group_size=group, signed=signed)


@pytest.mark.parametrize(
    "kind, group, dtype, qtype",
    [
        ("mxfp4", 32, None, "MXFP4"),
        ("nvfp4", 16, None, "NVFP4_256"),
        ("affine", 64, "bfloat16", "AFFINE4_64_BF16"),
        ("int", 128, "bfloat16", "INT4_128_BF16"),
        pytest.param("uint alone", 64, "bfloat16", "INT4_64_BF16", marks=FULL),
        pytest.param("affine", 32, "float16", "AFFINE4_32_F16", marks=FULL),
        pytest.param("int alone", 32, "float16", "INT4_32_F16", marks=FULL),
        pytest.param("uint", 128, "float16", "INT4_128_F16", marks=FULL),
    ],
)
def test_weights_of_4_bits_stay_the_same_in_tiles(kind, group, dtype, qtype):
    """Scales of NVFP4 that are NaN too."""
    w = four_bits(kind, group, dtype)
    tiles = jax.jit(interleave)(w)
    assert tiles.qtype == qtype and tiles.shape == w.shape
    assert tiles.nbytes <= 1.12 * w.nbytes
    np.testing.assert_array_equal(dequantize(tiles), dequantize(w))


def test_codes_in_bytes_are_packed():
    w = four_bits("affine", 64, "bfloat16")
    assert isinstance(w, AffineTensor)
    codes = np.asarray(w.codes).view(np.uint8)
    codes = np.stack([codes & 15, codes >> 4], -1).reshape(2, 32, 512)
    apart = AffineTensor(jnp.asarray(codes), w.scales, w.biases, 4, 64)
    np.testing.assert_array_equal(interleave(apart).tiles, interleave(w).tiles)


def test_products_with_tiles_of_4_bits():
    """Values and gradient of a format of the library."""
    w = interleave(four_bits("affine", 64, "bfloat16")[0])
    values = np.asarray(dequantize(w), np.float64)
    x = jnp.asarray(np.random.default_rng(0).normal(size=512), jnp.float32)
    y, pull = jax.vjp(lambda x: quantized_matmul(x, w), x)
    np.testing.assert_allclose(y, values @ np.asarray(x), rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(pull(y)[0], y @ values, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(
    "w",
    [
        four_bits("int", 128, "float32"),  # numbers of 32 bits
        four_bits("uint", 256, "bfloat16"),  # groups of 256
        MicroscaledTensor(  # 272 columns, no blocks of 256
            jnp.zeros((16, 136), jnp.uint8), jnp.zeros((16, 17), jnp.uint8)
        ),
        MicroscaledTensor(
            jnp.zeros((16, 32), jnp.uint8),
            jnp.zeros((16, 1), jnp.uint8),
            format="mxfp8",
        ),
    ],
)
def test_what_has_no_blocks_is_refused(w):
    with pytest.raises(TypeError, match=r"`w` must be .* in a block format"):
        interleave(w)


def test_errors():
    odd = GGUFTensor(jnp.zeros((17, 18), jnp.uint8), "Q4_0")
    with pytest.raises(TypeError, match=r"interleave: `w` must be .* multiple of 16"):
        interleave(odd)
    tiles = interleave(odd[:16])
    with pytest.raises(TypeError, match="dim `d` is 64 in `x` but 32 in `w`"):
        quantized_matmul(jnp.ones((1, 64)), tiles)
    with pytest.raises(TypeError, match="only the 1 leading dims"):
        tiles[0, 0]
