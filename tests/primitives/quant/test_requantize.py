"""requantize: exact where it says so, near elsewhere."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import AffineTensor, GGUFTensor, IntTensor, dequantize, requantize
from jaxkern.primitives.quant.requantize import AFFINE_CODES, INT_CODES
from tests.primitives.quant.block_bytes import random_blocks

EXACT = [("affine", q) for q in AFFINE_CODES] + [("int", q) for q in INT_CODES]


def finite_tensor(qtype: str) -> GGUFTensor:
    """Random bytes without the rows that have infinite or NaN scales."""
    blocks = random_blocks(qtype, 200, 256)
    values = np.asarray(dequantize(GGUFTensor(jnp.asarray(blocks), qtype)))
    finite = np.isfinite(values).all(-1)
    assert finite.sum() > 20
    return GGUFTensor(jnp.asarray(blocks[finite]), qtype)


@pytest.mark.parametrize("to, qtype", EXACT)
def test_exact_pairs_keep_every_bit(to, qtype):
    w = finite_tensor(qtype)
    t = requantize(w, to)
    assert isinstance(t, AffineTensor if to == "affine" else IntTensor)
    np.testing.assert_array_equal(dequantize(t), dequantize(w))


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


def test_refusals():
    with pytest.raises(ValueError, match="`to` must be one of affine, int, Q4_0"):
        requantize(jnp.ones((2, 32)), "Q9")
