"""dequantize: bits of `gguf`, other dtypes, stacks, memory, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import GGUFTensor, dequantize
from jaxkern.testing.checks import case
from tests.primitives.quant.block_bytes import (
    QTYPES,
    decoded,
    quiet_bytes,
    random_blocks,
    weight,
)

CASES = [
    case("iq4_nl", blocks=quiet_bytes(8, 36), qtype="IQ4_NL"),
    case("q6_k_stack", blocks=quiet_bytes(2, 8, 210), qtype="Q6_K"),
    case("one_row", blocks=quiet_bytes(1, 34), qtype="Q8_0"),
    case("q4_k", blocks=quiet_bytes(4, 144), qtype="Q4_K", dtype=jnp.bfloat16),
    case("iq2_s", blocks=quiet_bytes(4, 82), qtype="IQ2_S"),
    case("tq1_0", blocks=quiet_bytes(4, 54), qtype="TQ1_0"),
    case("smollm2_up", blocks=quiet_bytes(1536, 360), qtype="Q4_1"),
]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("qtype", QTYPES)
def test_one_rounding_from_float32(qtype, dtype):
    w, values = weight(qtype, 8, 512)
    np.testing.assert_array_equal(
        np.asarray(dequantize(w, dtype=dtype)), values.astype(np.float32).astype(dtype)
    )


def test_stack_of_experts_and_vmap():
    blocks = random_blocks("MXFP4", 3, 5, 64)
    stack = GGUFTensor(jnp.asarray(blocks), "MXFP4")
    expected = decoded(blocks, "MXFP4")
    np.testing.assert_array_equal(dequantize(stack), expected)
    np.testing.assert_array_equal(jax.vmap(dequantize)(stack), expected)


@pytest.mark.parametrize("shape", [(0, 256), (4, 0), (0, 0)])
def test_empty(shape):
    w = GGUFTensor(jnp.zeros((shape[0], shape[1] // 256 * 144), jnp.uint8), "Q4_K")
    assert dequantize(w).shape == w.shape == shape


@pytest.mark.parametrize("qtype", QTYPES)
def test_no_float_array_lies_between_the_bytes_and_the_result(qtype):
    w, _ = weight(qtype, 256, 2048)
    compiled = jax.jit(dequantize).lower(w).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 1.5 * w.size


def test_refusals():
    w = GGUFTensor(jnp.zeros((2, 20), jnp.uint8), "Q4_1")
    with pytest.raises(TypeError, match="dequantize: `w` must be a quantised tensor"):
        dequantize(w.blocks)
    with pytest.raises(TypeError, match="`dtype` must be a float dtype, got int8"):
        dequantize(w, dtype=jnp.int8)
    with pytest.raises(TypeError, match="rows of 20 bytes are no whole Q8_0 blocks"):
        dequantize(GGUFTensor(w.blocks, "Q8_0"))
    with pytest.raises(ValueError, match="`qtype` is 'Q9', not one of F32, F16"):
        dequantize(GGUFTensor(w.blocks, "Q9"))
    with pytest.raises(TypeError, match="must be uint8"):
        dequantize(GGUFTensor(w.blocks.astype(jnp.int32), "Q4_1"))
