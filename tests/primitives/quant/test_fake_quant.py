"""fake_quant: the round trip of each format forward, the identity backward."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import dequantize, fake_quant, quantize_affine

W = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
DY = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)


@pytest.mark.parametrize("qtype", ["Q4_0", "Q8_0"])
def test_qdq_legacy_is_the_round_trip_of_ggml(qtype):
    kind = gguf.GGMLQuantizationType[qtype]
    expected = gguf.quants.dequantize(gguf.quants.quantize(W, kind), kind)
    y, pull = jax.vjp(lambda w: fake_quant(w, qtype), jnp.asarray(W))
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(pull(DY)[0], DY)


@pytest.mark.parametrize("to, options", [("affine", {"bits": 3}), ("int", {"bits": 4})])
def test_other_formats_pass_the_gradient_straight_through(to, options):
    f = jax.jit(lambda w: fake_quant(w, to, **options))
    y, pull = jax.vjp(f, jnp.asarray(W))
    assert 0.05 < np.abs(y - W).max() < 1
    np.testing.assert_array_equal(pull(DY)[0], DY)
    np.testing.assert_array_equal(jax.jvp(f, (W,), (DY,))[1], DY)


def test_qdq_affine_with_frozen_codes():
    """y = q s + b; ds = sum of q dy, db = sum of dy, and dy to w."""
    options = {"group_size": 32, "quantizer": "minmax", "packed": False}
    frozen = quantize_affine(jnp.asarray(W), **options)
    y, pull = jax.vjp(fake_quant, jnp.asarray(W), frozen)
    np.testing.assert_array_equal(y, dequantize(frozen))
    dw, d = pull(DY)
    np.testing.assert_array_equal(dw, DY)
    each = DY.reshape(4, 2, 32).astype(np.float64)
    codes = np.asarray(frozen.codes, np.float64).reshape(4, 2, 32)
    np.testing.assert_allclose(d.scales, (codes * each).sum(-1), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(d.biases, each.sum(-1), rtol=1e-4, atol=1e-5)


def test_bfloat16():
    x = jnp.asarray(W, jnp.bfloat16)
    y = fake_quant(x, "Q8_0")
    assert y.dtype == jnp.bfloat16
    once = fake_quant(x.astype(jnp.float32), "Q8_0").astype(jnp.bfloat16)
    np.testing.assert_array_equal(y, once)


def test_refusals():
    with pytest.raises(ValueError, match="fake_quant: `to` must be one of affine"):
        fake_quant(W, "Q9")
    with pytest.raises(
        TypeError, match=r"`x` has shape \(64,\) but `to` has \(4, 64\)"
    ):
        fake_quant(jnp.ones(64), quantize_affine(jnp.asarray(W)))
