"""quantized_embedding: the named rows, zeros outside the table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import GGUFTensor, quantized_embedding
from jaxkern.testing.checks import case, i32
from tests.primitives.quant.block_bytes import QTYPES, quiet_bytes, weight

CASES = [
    case("q8_0", ids=i32(4, 8, high=16), blocks=quiet_bytes(16, 68), qtype="Q8_0"),
    case(
        "outside", ids=i32(9, low=-9, high=9), blocks=quiet_bytes(5, 18), qtype="Q4_0"
    ),
    case("empty", ids=i32(0), blocks=quiet_bytes(3, 210), qtype="Q6_K"),
    case(
        "smollm2",
        ids=i32(2, 64, high=49152),
        blocks=quiet_bytes(49152, 612),
        qtype="Q8_0",
        full=True,
    ),
]


@pytest.mark.parametrize("qtype", QTYPES)
def test_rows_of_the_table(qtype):
    w, values = weight(qtype, 7, 256)
    ids = np.array([[6, 0], [3, 3]])
    np.testing.assert_array_equal(quantized_embedding(ids, w), values[ids])


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int32, jnp.uint32])
def test_ids_outside_the_table_give_zeros(dtype):
    w, values = weight("Q4_0", 200, 32)  # zero bytes would decode to -0.0
    outside = -1 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.iinfo(dtype).max
    y = np.asarray(quantized_embedding(jnp.array([5, outside], dtype), w))
    np.testing.assert_array_equal(y[0], values[5])
    assert not y[1].any() and not np.signbit(y[1]).any()


def test_a_table_without_rows_gives_zeros():
    w = GGUFTensor(jnp.zeros((0, 18), jnp.uint8), "Q4_0")
    assert not np.asarray(quantized_embedding(jnp.array([0, 1]), w)).any()


def test_only_the_rows_asked_for_are_decoded():
    w, _ = weight("Q8_0", 4096, 256)
    f = jax.jit(quantized_embedding)
    compiled = f.lower(jnp.arange(4), w).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < w.nbytes // 16


def test_dtype():
    w, values = weight("Q5_1", 4, 32)
    y = quantized_embedding(jnp.array(2), w, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(y), values[2].astype(jnp.bfloat16))


def test_refusals():
    w, _ = weight("Q5_1", 4, 32)
    with pytest.raises(TypeError, match="`ids` must have a dtype of kind Integer"):
        quantized_embedding(jnp.ones(3), w)
    with pytest.raises(TypeError, match="`w` must have 2 dims"):
        quantized_embedding(jnp.array(0), w[0])
    with pytest.raises(TypeError, match="`dtype` must be a float dtype"):
        quantized_embedding(jnp.array(0), w, dtype=jnp.int32)
