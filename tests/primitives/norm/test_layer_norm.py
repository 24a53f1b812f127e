"""layer_norm: formula and gradient, rows far from zero, constant rows, eps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import layer_norm
from jaxkern.testing.checks import bf16, case, f16, f32

CASES = [
    case("gpt2_decode", x=bf16(8, 768), weight=bf16(768), bias=bf16(768)),
    case("whisper_large_v3", x=f16(2, 20, 1280), weight=f16(1280), bias=f16(1280)),
    case("vit_l_16", full=True, x=bf16(8, 197, 1024), weight=bf16(1024), eps=1e-6),
    case("plain", x=f32(8, 4, 16), weight=f32(16), bias=f32(16)),
    case("no_bias", x=f32(3, 7, 13), weight=f32(13)),
    case("offset", x=f32(4, 16), weight=f32(16, scale=0.1), bias=f32(16), offset=1.0),
    case("no_weight", x=f32(2, 8), bias=f32(8), eps=0.1),
    case("bare", x=f32(3, 37, 13)),
    case("one_element", x=f32(5, 1), weight=f32(1), bias=f32(1)),
    case("row", x=f16(130), weight=f16(130), bias=f16(130)),
    case("empty_rows", x=f32(0, 16), weight=f32(16), bias=f32(16)),
    case("empty_dim", x=f32(4, 0), weight=f32(0)),
]


def formula(x, weight=1.0, bias=0.0, eps=1e-5, axis=-1):
    x = np.asarray(x, np.float64)
    centred = x - x.mean(axis, keepdims=True)
    variance = (centred**2).mean(axis, keepdims=True)
    return centred / np.sqrt(variance + eps) * weight + bias


def gradient(x, dy, eps=1e-5, axis=-1):
    """Of y without weight and bias, written in x alone."""
    centred = x - x.mean(axis, keepdims=True)
    std = np.sqrt((centred**2).mean(axis, keepdims=True) + eps)
    dx = dy / std - centred * (dy * centred).mean(axis, keepdims=True) / std**3
    return dx - dx.mean(axis, keepdims=True)


@pytest.mark.parametrize("eps", [1e-5, 3.0])
def test_values_and_gradients_match_the_formula(eps):
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 5, 33)) + 2
    weight, bias = rng.normal(size=(2, 33))
    y, vjp = jax.vjp(
        lambda *operands: layer_norm(*operands, eps=eps),
        *map(jnp.float32, (x, weight, bias)),
    )
    np.testing.assert_allclose(y, formula(x, weight, bias, eps), atol=3e-6)
    dx, dweight, dbias = vjp(jnp.float32(dy))
    np.testing.assert_allclose(dx, gradient(x, dy * weight, eps), atol=5e-6)
    np.testing.assert_allclose(dweight, (dy * formula(x, eps=eps)).sum(0), atol=1e-5)
    np.testing.assert_allclose(dbias, dy.sum(0), rtol=1e-6)


def test_the_offset_is_added_to_the_weight():
    """In the value and in dx; the gradient of the weight does not know it."""
    rng = np.random.default_rng(3)
    x, dy = rng.normal(size=(2, 5, 33)) + 2
    weight, bias = rng.normal(size=(2, 33))
    with jax.enable_x64(True):
        y, vjp = jax.vjp(
            lambda *operands: layer_norm(*operands, offset=1.0),
            *map(jnp.asarray, (x, weight, bias)),
        )
        dx, dweight, _ = vjp(jnp.asarray(dy))
    np.testing.assert_allclose(y, formula(x, weight + 1, bias), rtol=1e-10)
    np.testing.assert_allclose(
        dx, gradient(x, dy * (weight + 1)), rtol=1e-9, atol=1e-12
    )
    np.testing.assert_allclose(dweight, (dy * formula(x)).sum(0), rtol=1e-10)


@pytest.mark.parametrize("d", [33, 4096])
@pytest.mark.parametrize("offset", [1e4, -1e6])
def test_rows_far_from_zero_keep_their_digits(d, offset):
    noise, dy = np.random.default_rng(0).normal(size=(2, 3, d))
    x = jnp.float32(noise + offset)
    y, vjp = jax.vjp(layer_norm, x)
    exact = np.asarray(x, np.float64)
    spacing = np.spacing(np.float32(abs(offset)))  # of the mean, in units of std
    np.testing.assert_allclose(y, formula(exact), atol=spacing)
    (dx,) = vjp(jnp.float32(dy))
    np.testing.assert_allclose(dx, gradient(exact, dy), atol=6 * spacing)


@pytest.mark.parametrize("value", [0.1, -3e4, 1e9])
def test_a_constant_row_gives_the_bias(value):
    bias = jnp.arange(769.0)
    y, vjp = jax.vjp(layer_norm, jnp.full((2, 769), value), jnp.ones(769), bias)
    np.testing.assert_array_equal(y, np.tile(bias, (2, 1)))
    dy = np.random.default_rng(0).normal(size=(2, 769))
    dx, dweight, _ = vjp(jnp.float32(dy))
    expected = (dy - dy.mean(-1, keepdims=True)) / np.sqrt(1e-5)
    np.testing.assert_allclose(dx, expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(dweight, np.zeros(769))


def test_eps_is_added_to_the_biased_variance():
    y = layer_norm(jnp.asarray([[1.0, 5.0]]), eps=5.0)  # variance 4
    np.testing.assert_allclose(y, [[-2 / 3, 2 / 3]], rtol=1e-6)


def test_large_half_precision_values_do_not_overflow():
    x = jnp.asarray([[6e4, -6e4] * 8], jnp.float16)
    y, vjp = jax.vjp(layer_norm, x)
    np.testing.assert_array_equal(y, [[1, -1] * 8])
    assert np.isfinite(vjp(jnp.ones_like(x))[0]).all()
