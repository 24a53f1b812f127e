"""add_rms_norm: the formula, and one rounding where the unfused chain has two."""

import jax.numpy as jnp
import numpy as np

from jaxkern import add_rms_norm
from jaxkern.testing.checks import bf16, case, f32
from tests.primitives.norm.test_rms_norm import formula

CASES = [
    case(
        "llama3_8b_decode",
        x=bf16(4, 4096),
        residual=bf16(4, 4096),
        weight=bf16(4096),
        eps=1e-5,
    ),
    case("plain", x=f32(8, 4, 16), residual=f32(8, 4, 16), weight=f32(16)),
    case("gemma_bias", x=f32(2, 8), residual=f32(2, 8), weight=f32(8), bias=f32(8)),
    case("mixed_dtypes", x=bf16(3, 7, 13), residual=f32(3, 7, 13)),
    case("empty", x=f32(0, 16), residual=f32(0, 16), weight=f32(16)),
]


def test_formula():
    rng = np.random.default_rng(0)
    x, residual = rng.normal(size=(2, 5, 33))
    weight, bias = rng.normal(size=(2, 33))
    operands = map(jnp.float32, (x, residual, weight, bias))
    y, total = add_rms_norm(*operands, eps=1e-3, offset=1.0)
    np.testing.assert_allclose(total, x + residual, atol=1e-6)
    expected = formula(x + residual, weight, bias, 1e-3, 1.0)
    np.testing.assert_allclose(y, expected, atol=4e-6)


def test_the_sum_is_not_rounded_before_the_norm():
    x = jnp.full((1, 2), 256.0, jnp.bfloat16)
    residual = jnp.asarray([[0.5, 1.0]], jnp.bfloat16)  # lost in a bfloat16 sum
    y, total = add_rms_norm(x, residual)
    np.testing.assert_array_equal(total[0, 0], x[0, 0])
    exact = formula(np.asarray([[256.5, 257.0]]))
    np.testing.assert_allclose(y.astype(jnp.float32), exact, rtol=2**-8)
    y32, _ = add_rms_norm(x.astype(jnp.float32), residual)
    np.testing.assert_allclose(y32, exact, rtol=1e-6)
