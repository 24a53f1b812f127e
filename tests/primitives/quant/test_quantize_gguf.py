"""quantize_gguf: the bytes of the `gguf` package, ztensor's encoder by hand."""

import functools

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import dequantize, quantize_gguf
from tests.checks import bf16, case, f32
from tests.primitives.quant.block_bytes import Q8_K

QTYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
CASES = [
    case("q4_0", w=f32(4, 64), qtype="Q4_0"),
    case("q8_k", full=True, w=f32(2, 256), qtype="Q8_K"),
    case("q5_1", w=bf16(2, 32), qtype="Q5_1"),
]


def difficult_weights() -> np.ndarray:
    """Random, then ties, integers, zeros, constants and very small rows."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(60, 320)).astype(np.float32)
    w[10:20] = np.round(4 * w[10:20]) / 4
    w[20:40] = rng.integers(-8, 9, (20, 320))
    w[40], w[41], w[42] = 0, 1.7, -3
    w[43:50] *= np.float32(1e-7)
    return w


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("qtype", QTYPES)
def test_the_bytes_of_gguf(qtype, compile):
    """D18: Q8_0 rounds halves away from zero, the others truncate after + 0.5."""
    w = difficult_weights()
    quantize = functools.partial(quantize_gguf, qtype=qtype)
    actual = (jax.jit(quantize) if compile else quantize)(jnp.asarray(w))
    expected = gguf.quants.quantize(w, gguf.GGMLQuantizationType[qtype])
    np.testing.assert_array_equal(actual.blocks, expected)
    assert actual.shape == w.shape and actual.qtype == qtype


def q8_k_by_hand(x: np.ndarray) -> np.ndarray:
    """Rows of 256 as block_q8_K, as ggml's reference rounds them."""
    block = np.zeros(x.shape[0], Q8_K)
    for b, row in zip(block, x, strict=True):
        largest = row[np.argmax(np.abs(row))]  # the first of several
        if largest != 0:
            inverse = np.float32(-127) / largest
            b["d"] = np.float32(1) / inverse
            b["qs"] = np.minimum(np.rint(inverse * row), 127)
            b["bsums"] = b["qs"].reshape(16, 16).sum(1)
    return block


def test_q8_k_is_ggmls_format_of_activations():
    x = difficult_weights()[:, :256]
    x[41, 3:5], x[42, :2] = [4.0, -4.0], [2.5, -127.0]  # a tie; a half goes to even
    actual = quantize_gguf(jnp.asarray(x), "Q8_K")
    assert actual.shape == x.shape and actual.blocks.shape == (60, 292)
    expected = q8_k_by_hand(x)
    fields = np.asarray(actual.blocks).view(Q8_K)[:, 0]
    for name in ("d", "qs", "bsums"):
        np.testing.assert_array_equal(fields[name], expected[name], err_msg=name)
    assert list(fields["qs"][42, :3]) == [2, -127, -3]
    error = np.abs(dequantize(actual) - x)
    half_step = np.abs(x).max(1, keepdims=True) / 254
    assert (error <= half_step * (1 + 1e-5)).all()


def test_d19_the_encoder_of_ztensor():
    w = np.zeros(32, np.float32)
    w[[0, 1, 2, 16]] = [7.0, -7.0, 2.5, -1.5]  # d = 1
    absmax = quantize_gguf(jnp.asarray(w), "Q4_0", encoder="absmax")
    expected = np.zeros(32)
    expected[[0, 1, 2, 16]] = [7, -7, 3, -2]
    np.testing.assert_array_equal(dequantize(absmax), expected)
    ggml = quantize_gguf(jnp.asarray(w), "Q4_0")  # d = -7 / 8: 2.5 / d + 8.5 -> 5
    assert dequantize(ggml)[2] == 2.625


def test_refusals():
    with pytest.raises(ValueError, match="no 'Q4_K' 'ggml', but Q4_0 ggml"):
        quantize_gguf(jnp.ones(256), "Q4_K")
    with pytest.raises(ValueError, match="no 'Q8_0' 'absmax'"):
        quantize_gguf(jnp.ones(32), "Q8_0", encoder="absmax")
    with pytest.raises(TypeError, match="d = 33 is not a multiple of 32"):
        quantize_gguf(jnp.ones(33), "Q8_0")
