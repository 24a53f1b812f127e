"""Rows and experts of interleaved blocks on a GPU; products: fused_products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    InterleavedTensor,
    backend,
    dequantize,
    quantize_affine,
    quantize_int,
    quantize_microscaled,
    quantized_matmul,
)
from jaxkern.models.packed_parts import in_tiles
from jaxkern.primitives.quant.interleaved_tensor import interleaved, rows_of
from jaxkern.primitives.quant.tile_formats import decode_blocks
from jaxkern.triton.quant.several_products import wide_product
from tests.gpu.quant.row_checks import (
    check_experts,
    check_product,
    check_rows,
    check_weights,
    compare,
    normal,
    on_the_cpu,
    rounded,
)
from tests.gpu.quant.test_fused_products import TESTED, weights
from tests.gpu.truth import on_a_gpu, poison

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("qtype", TESTED)
def test_rows(qtype, dtype):
    check_rows(*weights(qtype, 48, 1280), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("qtype", TESTED)
def test_weights(qtype, dtype):
    w, values = weights(qtype, 48, 1280)
    check_weights(w, values, dtype)
    stack = jax.tree.map(lambda a: a.reshape(3, 1, -1), w)
    check_weights(stack, values, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "qtype", ["Q4_K", "Q6_K", "MXFP4", "Q2_K", "NVFP4_256", "INT4_128_BF16"]
)
def test_experts(qtype, dtype):
    w, values = weights(qtype, 5 * 48, 1024)
    stack = jax.tree.map(lambda a: a.reshape(5, 3, -1), w)
    check_experts(stack, values.reshape(5, 48, 1024), dtype=dtype)


def test_one_token_of_many_experts():
    w, values = weights("Q4_K", 16 * 32, 512)
    stack = jax.tree.map(lambda a: a.reshape(16, 2, -1), w)
    check_experts(stack, values.reshape(16, 32, 512), tokens=1, top_k=8)
    check_experts(stack, values.reshape(16, 32, 512), tokens=8, top_k=8)


QUANTIZE = {
    "mxfp4": functools.partial(quantize_microscaled, format="mxfp4"),
    "nvfp4": functools.partial(quantize_microscaled, format="nvfp4"),
    "int4": functools.partial(quantize_int, bits=4, group_size=128),
    "uint4": functools.partial(quantize_int, bits=4, group_size=64, zero_point=True),
    "affine": functools.partial(quantize_affine, bits=4, group_size=64),
}


@pytest.mark.parametrize("kind", QUANTIZE)
def test_containers_side_by_side(kind):
    """The weights of each container, put side by side on the GPU as loaders do."""

    def quantize(w):
        return QUANTIZE[kind](w.astype(jnp.bfloat16))

    w, values = on_the_cpu(quantize, normal((96, 4096)))
    tiles = in_tiles(w)
    np.testing.assert_array_equal(dequantize(tiles), values.astype(np.float32))
    for rows in (1, 4, 16, 64):
        check_product(tiles, values, rows)
    check_rows(tiles, values)


@pytest.mark.parametrize(
    "qtype", ["Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q5_0", "MXFP4", "INT4_128_BF16"]
)
def test_hundreds_of_activations(qtype):
    """Tiles of two programs, of one, and fewer than there are multiprocessors."""
    w, values = weights(qtype, 5248, 1280)
    for rows in (1300, 513, 129):
        x = jnp.asarray(0.1 * normal((rows, 1280), rows), jnp.bfloat16)
        poison(jnp.zeros((rows, 5248), jnp.bfloat16))
        found = jax.jit(lambda x, t: wide_product(x, t, qtype))(x, w.tiles)
        x64 = np.asarray(x, np.float64)
        plain = (rounded(x64) @ rounded(values).T).astype("bfloat16")
        compare(found, x64 @ values.T, plain, "bfloat16")


@pytest.mark.parametrize("qtype", ["Q4_K", "Q6_K", "Q8_0", "MXFP4"])
def test_logits(qtype):
    """Rows of several rounds of a program, two and a rest on an H200."""
    check_product(*weights(qtype, 71_008, 256), 1)


@pytest.mark.parametrize("qtype", ["NVFP4_256", "MXFP4"])
def test_scales_that_are_not_normal(qtype):
    """NaN of NVFP4; of MXFP4 2**-127, below the normal numbers; by whole numbers."""
    w, values = weights(qtype, 32, 512)
    rows = np.array(rows_of(w.tiles, qtype)).reshape(32, -1)
    x = jnp.full(512, 2.0**100 if qtype == "MXFP4" else 1.0, jnp.bfloat16)
    if qtype == "MXFP4":
        rows[3, ::17] = 0
        with jax.default_device(jax.devices("cpu")[0]):
            row = decode_blocks(jnp.asarray(rows[3]), qtype, dtype=jnp.float32)
        values[3] = row
    else:
        rows[5, 4 + 7] = 127
        values[5] = np.nan
    w = InterleavedTensor(jnp.asarray(interleaved(rows, qtype)), qtype)
    with backend("triton", strict=True):
        found = jax.jit(quantized_matmul)(x, w).astype(jnp.float32)
    truth = values @ np.asarray(x, np.float64)
    np.testing.assert_allclose(found, truth, rtol=1e-2)
