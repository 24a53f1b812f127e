"""gguf_blocks: every format bit by bit against the `gguf` package."""

import functools

import gguf
import jax
import numpy as np
import pytest

from jaxkern.primitives.quant.gguf_blocks import BLOCK_FORMATS, decode_rows
from tests.primitives.quant.block_bytes import QTYPES, decoded, random_blocks


def assert_same_bits(actual, expected):
    """Same bits, signed zeros and subnormals included; NaN where NaN."""
    actual = np.asarray(actual)
    assert actual.dtype == expected.dtype == np.float32
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    np.testing.assert_array_equal(
        actual.view(np.uint32)[~nan], expected.view(np.uint32)[~nan]
    )


@pytest.mark.parametrize("qtype", QTYPES)
def test_block_sizes_are_those_of_ggml(qtype):
    form = BLOCK_FORMATS[qtype]
    sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[qtype]]
    assert (form.elements, form.bytes) == sizes


@pytest.mark.parametrize("compile", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("qtype", QTYPES)
def test_random_bytes_decode_to_the_bits_of_gguf(qtype, compile):
    blocks = random_blocks(qtype, 37, 2560)
    decode = compile(functools.partial(decode_rows, qtype=qtype))
    assert_same_bits(decode(blocks), decoded(blocks, qtype))


@pytest.mark.parametrize("qtype", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16"])
def test_quantised_weights_decode_to_the_bits_of_gguf(qtype):
    w = np.random.default_rng(0).standard_normal((16, 512), np.float32)
    blocks = gguf.quants.quantize(w, gguf.GGMLQuantizationType[qtype])
    actual = jax.jit(functools.partial(decode_rows, qtype=qtype))(blocks)
    assert_same_bits(actual, decoded(blocks, qtype))
    assert np.abs(actual - w).max() < 0.3  # really the weights


def test_every_half_precision_scale():
    halves = np.arange(2**16, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    codes = np.full((2**16, 32), 3, np.uint8)
    blocks = np.concatenate([halves, codes], axis=-1)
    actual = jax.jit(functools.partial(decode_rows, qtype="Q8_0"))(blocks)
    assert_same_bits(actual, decoded(blocks, "Q8_0"))


@pytest.mark.parametrize("qtype", ["MXFP4", "NVFP4"])
def test_every_scale_with_every_code(qtype):
    """Subnormal results too, which XLA flushes to zero in float arithmetic."""
    form = BLOCK_FORMATS[qtype]
    head = 1 if qtype == "MXFP4" else 4
    scale = np.repeat(np.arange(256, dtype=np.uint8)[:, None], head, axis=1)
    every_code = np.arange(16, dtype=np.uint8) * 0x11
    codes = np.tile(every_code, (256, (form.bytes - head) // 16))
    blocks = np.concatenate([scale, codes], axis=-1)
    actual = jax.jit(functools.partial(decode_rows, qtype=qtype))(blocks)
    assert_same_bits(actual, decoded(blocks, qtype))


def test_nvfp4_by_hand():
    """Sub-block s: bytes 4 + 8s ..., low nibbles first; scale 0x38 is 1, 0x7f is 0."""
    block = np.zeros(36, np.uint8)
    block[:4] = [0x38, 0x40, 0x01, 0x7F]
    block[4:12] = 0x72  # low nibbles 1.0, high nibbles 6.0
    block[12] = 0xF9  # low nibble -0.5, high nibble -6.0
    block[20], block[28] = 0x01, 0x77
    w = np.asarray(decode_rows(block, "NVFP4"))
    expected = np.zeros(64, np.float32)
    expected[:8], expected[8:16] = 1.0, 6.0
    expected[16], expected[24] = 2 * -0.5, 2 * -6.0
    expected[32] = 0.5 * 2.0**-9
    np.testing.assert_array_equal(w, expected)
