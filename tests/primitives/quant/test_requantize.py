"""requantize: exact where it says so, near elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    AffineTensor,
    GGUFTensor,
    IntTensor,
    dequantize,
    quantize_fp8,
    quantize_gguf,
    quantize_microscaled,
    requantize,
)
from jaxkern.primitives.quant.quantize_gguf import ENCODERS
from jaxkern.primitives.quant.requantize import AFFINE_CODES, INT_CODES
from tests.primitives.quant.block_bytes import random_blocks

EXACT = [("affine", q) for q in AFFINE_CODES] + [("int", q) for q in INT_CODES]


def finite_tensor(qtype: str) -> GGUFTensor:
    """Random bytes without the rows that have infinite or NaN scales."""
    blocks = random_blocks(qtype, 200, 256)
    values = np.asarray(jax.jit(dequantize)(GGUFTensor(jnp.asarray(blocks), qtype)))
    finite = np.isfinite(values).all(-1)
    assert finite.sum() > 20
    return GGUFTensor(jnp.asarray(blocks[finite]), qtype)


@pytest.mark.parametrize("to, qtype", EXACT)
def test_exact_pairs_keep_every_bit(to, qtype):
    w = finite_tensor(qtype)
    t = requantize(w, to)
    assert isinstance(t, AffineTensor if to == "affine" else IntTensor)
    found, expected = map(jax.jit(dequantize), (t, w))
    np.testing.assert_array_equal(found, expected)


def test_bits_may_be_wider_than_needed():
    w = finite_tensor("Q4_0")
    four, eight = requantize(w, "int"), requantize(w, "int", bits=8)
    assert (four.bits, eight.bits) == (4, 8)
    np.testing.assert_array_equal(dequantize(four), dequantize(eight))


def test_other_options_quantise_anew():
    values = np.random.default_rng(0).normal(size=(4, 256)).astype(np.float32)
    w = requantize(values, "Q8_0")
    assert requantize(w, "Q8_0") is w
    for to, options in [
        ("affine", {"bits": 4, "group_size": 64}),
        ("int", {"bits": 8}),
        ("Q5_1", {}),
    ]:
        t = requantize(w, to, **options)
        error = np.abs(dequantize(t) - values).max()
        assert 1e-3 < error < 0.5, to
    back = requantize(t, "affine", bits=8, group_size=32)
    assert np.abs(dequantize(back) - dequantize(t)).max() < 0.02


@pytest.mark.parametrize("to", ["fp8", "nvfp4", "mxfp4", "mxfp8"])
def test_the_small_float_formats_are_those_of_their_own_functions(to):
    """The tests above go through its table, where these were missing."""
    w = requantize(np.random.default_rng(0).normal(size=(4, 256)), "Q8_0")
    t, values = requantize(w, to), dequantize(w)
    own = (
        quantize_fp8(values) if to == "fp8" else quantize_microscaled(values, format=to)
    )
    assert type(t) is type(own) and t.format == own.format
    for a, e in zip(*map(jax.tree.leaves, (t, own)), strict=True):
        np.testing.assert_array_equal(a, e)


def test_options_of_the_small_float_formats():
    t = requantize(jnp.ones((256, 256)), "fp8", block=(128, 128), format="e5m2")
    assert (t.block, t.format) == ((128, 128), "e5m2")


@pytest.mark.parametrize("qtype", sorted({q for q, _ in ENCODERS} | {"Q4_K", "Q6_K"}))
def test_every_type_that_quantize_gguf_knows_and_its_own(qtype):
    w = finite_tensor(qtype)
    assert requantize(w, qtype) is w
    if qtype in {q for q, _ in ENCODERS}:
        values = jnp.ones((1, 256))
        expected = quantize_gguf(values, qtype)
        np.testing.assert_array_equal(requantize(values, qtype).blocks, expected.blocks)


def test_refusals():
    with pytest.raises(ValueError, match="`to` must be one of affine, int, fp8, "):
        requantize(jnp.ones((2, 32)), "Q9")
