"""quantize_gguf: the bytes of the `gguf` package, ztensor's encoder by hand."""

import functools

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import GGUFTensor, dequantize, quantize_gguf
from jaxkern.primitives.quant.scale_search import (
    affine_fit,
    nearest_in,
    symmetric_fit,
    weights_of,
)
from jaxkern.testing.checks import bf16, case, f32
from tests.primitives.quant.block_bytes import Q8_K

QTYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
OTHERS_OF_GGUF = ["MXFP4", "TQ1_0", "TQ2_0"]
CASES = [
    case("q4_0", w=f32(4, 64), qtype="Q4_0"),
    case("q8_k", full=True, w=f32(2, 256), qtype="Q8_K"),
    case("q5_1", w=bf16(2, 32), qtype="Q5_1"),
    case("q4_k", full=True, w=f32(2, 256), qtype="Q4_K"),
    case("q6_k", full=True, w=f32(2, 256), qtype="Q6_K"),
    case("iq4_xs", full=True, w=f32(2, 256), qtype="IQ4_XS"),
]
# encoders that search: error of normal weights in percent, codes, weights of a group,
# the range of the codes of their scales
AFFINE = {
    "Q2_K": (27.8, 3, 16, 15),
    "Q4_K": (7.27, 15, 32, 63),
    "Q5_K": (3.62, 31, 32, 63),
}
SYMMETRIC = {
    "Q3_K": (14.7, 4, 16, 32),
    "Q6_K": (1.76, 32, 16, 128),
    "IQ4_NL": (7.63, 7, 32, None),
    "IQ4_XS": (7.70, 7, 32, 32),
}


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


@pytest.mark.parametrize("qtype", OTHERS_OF_GGUF)
def test_the_bytes_of_gguf_in_other_formats(qtype):
    """They had a decoder alone, so no test asked for an encoder."""
    w = difficult_weights()[:, :256]
    expected = gguf.quants.quantize(w, gguf.GGMLQuantizationType[qtype])
    np.testing.assert_array_equal(quantize_gguf(jnp.asarray(w), qtype).blocks, expected)


@pytest.mark.parametrize("qtype", [*AFFINE, *SYMMETRIC])
def test_encoders_that_search(qtype):
    """`gguf` decodes the blocks, and has no encoder of these to compare with.

    A weight is off by half a step, a whole one where the search cuts the ends, and by
    what the rounding of its group's scale adds, which is a share of the largest one.
    """
    w = np.concatenate([difficult_weights()[:, :256], normal_weights()])
    blocks = np.asarray(quantize_gguf(jnp.asarray(w), qtype).blocks)
    y = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[qtype])
    np.testing.assert_array_equal(y, dequantize(GGUFTensor(jnp.asarray(blocks), qtype)))
    affine = qtype in AFFINE
    percent, codes, size, of_scale = (AFFINE if affine else SYMMETRIC)[qtype]
    error = (y - w)[-NORMAL:]
    assert 100 * np.sqrt(np.mean(error**2)) <= percent * np.sqrt(
        np.mean(w[-NORMAL:] ** 2)
    )
    x = w.reshape(len(w), -1, size).astype(np.float64)
    low = np.minimum(x.min(-1), 0) if affine else -np.abs(x).max(-1)
    high = x.max(-1) if affine else 0
    step = (high - low) / codes
    rounded = 0 if of_scale is None else (codes + 1) / of_scale * step.max(-1)
    bound = 1.6 * step + 0.6 * np.reshape(rounded, (-1, 1)) + 1e-6
    bound += np.abs(x).max((-2, -1))[:, None] * 2.0**-11  # d and dmin are f16
    assert (np.abs(y - w).reshape(x.shape) <= bound[..., None]).all()
    assert not y[40].any(), "zeros stay zeros"


NORMAL = 128  # rows


def normal_weights() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(NORMAL, 256)).astype(np.float32)


def test_a_fit_beats_each_of_its_grid():
    """By hand: weights near 0 to 3 and an outlier, which two bits cannot all hold."""
    x = jnp.array([0.1, 1.0, 2.0, 3.0, 0.1, 1.0, 2.0, 3.5])
    fit = jax.jit(functools.partial(affine_fit, last=3))
    scale, minimum = fit(x)
    w = np.asarray(weights_of(x))
    np.testing.assert_allclose(w, x + np.sqrt(np.mean(np.square(x))), rtol=1e-6)

    def error(step, low=0.0):
        code = np.clip(np.round((x + low) / step), 0, 3)
        return np.sum(w * (code * step - low - x) ** 2)

    assert minimum >= 0 and all(
        error(scale, minimum) <= error(s) for s in (1.0, 3.5 / 3)
    )
    for constant in -3.0, 0.0, 1.7:  # codes that are all the same say no slope
        scale, minimum = fit(jnp.full(8, constant))
        held = np.arange(4) * scale - minimum
        assert np.abs(held - constant).min() <= 1e-6
    signed = jax.jit(functools.partial(symmetric_fit, half=4))
    np.testing.assert_allclose(signed(-2.0 * jnp.arange(-4.0, 4.0)), -2.0)
    place, number = nearest_in(jnp.array([-9.0, 0.4, 0.6, 9.0]), (-2, 0, 1))
    assert (list(place), list(number)) == ([0, 1, 2, 2], [-2, 0, 1, 1])


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
    with pytest.raises(ValueError, match="no 'IQ2_XS' 'ggml', but Q4_0 ggml"):
        quantize_gguf(jnp.ones(256), "IQ2_XS")
    with pytest.raises(TypeError, match="d = 32 is not a multiple of 256"):
        quantize_gguf(jnp.ones(32), "Q4_K")
    with pytest.raises(ValueError, match="no 'Q8_0' 'absmax'"):
        quantize_gguf(jnp.ones(32), "Q8_0", encoder="absmax")
    with pytest.raises(TypeError, match="d = 33 is not a multiple of 32"):
        quantize_gguf(jnp.ones(33), "Q8_0")
