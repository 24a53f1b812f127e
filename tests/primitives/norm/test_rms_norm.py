"""rms_norm: the formula, Gemma's offset, bias, large values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import rms_norm
from jaxkern.testing.checks import bf16, case, f16, f32

CASES = [
    case("llama3_8b_decode", x=bf16(4, 4096), weight=bf16(4096), eps=1e-5),
    case("qwen3_head_norm", x=bf16(2, 16, 8, 128), weight=bf16(128)),
    case("gemma2_2b", x=bf16(64, 2304), weight=bf16(2304), offset=1.0),
    case("llama3_8b_prefill", full=True, x=bf16(4096, 4096), weight=bf16(4096)),
    case("plain", x=f32(8, 4, 16), weight=f32(16)),
    case("bias", x=f32(2, 8), weight=f32(8), bias=f32(8), offset=1.0),
    case("no_weight", x=f32(3, 37, 13), eps=1e-5),
    case("empty", x=f32(0, 16), weight=f32(16)),
    case("one_row", x=f16(130), weight=f16(130)),
]


def formula(x, weight=1.0, bias=0.0, eps=1e-6, offset=0.0):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * (weight + offset) + bias


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_formula(offset):
    rng = np.random.default_rng(0)
    x, weight, bias = rng.normal(size=(5, 33)), rng.normal(size=33), rng.normal(size=33)
    y = rms_norm(*map(jnp.float32, (x, weight, bias)), eps=1e-3, offset=offset)
    np.testing.assert_allclose(y, formula(x, weight, bias, 1e-3, offset), atol=2e-6)


def test_eps_is_added_to_the_mean_of_the_squares():
    y = rms_norm(jnp.full((1, 4), 2.0), eps=5.0)
    np.testing.assert_allclose(y, np.full((1, 4), 2 / 3), rtol=1e-6)


def test_large_half_precision_values_do_not_overflow():
    y = rms_norm(jnp.full((2, 8), 6e4, jnp.float16))
    np.testing.assert_array_equal(y, np.ones((2, 8)))


def test_gradient_has_the_third_power_of_rstd():
    rng = np.random.default_rng(1)
    x, dy, weight = rng.normal(size=(4, 9)), rng.normal(size=(4, 9)), rng.normal(size=9)
    r = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    mean = (dy * weight * x).mean(-1, keepdims=True)
    _, pull = jax.vjp(rms_norm, jnp.float32(x), jnp.float32(weight))
    dx, dweight = pull(jnp.float32(dy))
    np.testing.assert_allclose(dx, r * weight * dy - x * r**3 * mean, atol=1e-5)
    np.testing.assert_allclose(dweight, (dy * x * r).sum(0), atol=1e-5)
