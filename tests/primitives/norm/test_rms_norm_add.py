"""rms_norm_add: formula and gradient, the scale of the sum, one rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import rms_norm_add
from jaxkern.testing.checks import bf16, case, f16, f32
from tests.primitives.norm.test_rms_norm import formula as norm

CASES = [
    case(
        "gemma2_2b_decode",
        x=bf16(4, 2304),
        residual=bf16(4, 2304),
        weight=bf16(2304),
        offset=1.0,
    ),
    case(
        "gemma4_layer_scalar",
        x=bf16(4, 2560),
        residual=bf16(4, 2560),
        weight=bf16(2560),
        scale=bf16(1),
    ),
    case("plain", x=f32(8, 4, 16), residual=f32(8, 4, 16), weight=f32(16)),
    case(
        "vector", x=f32(2, 8), residual=f32(2, 8), weight=f32(8), scale=f32(8), eps=0.1
    ),
    case("scalar", x=f32(2, 8), residual=f32(2, 8), scale=f32(1)),
    case("mixed_dtypes", x=f16(3, 7, 13), residual=f32(3, 7, 13), weight=f32(13)),
    case("one_element", x=f32(5, 1), residual=f32(5, 1), scale=f32(1)),
    case("empty", x=f32(0, 16), residual=f32(0, 16), weight=f32(16)),
]


@pytest.mark.parametrize("scale_shape", [(), (1,), (33,)])
def test_values_and_gradients_match_the_formula(scale_shape):
    rng = np.random.default_rng(0)
    x, residual, dy = rng.normal(size=(3, 5, 33))
    weight, scale = rng.normal(size=33), rng.normal(size=scale_shape)
    y, vjp = jax.vjp(
        lambda *operands: rms_norm_add(*operands, eps=0.1, offset=1.0),
        *map(jnp.float32, (x, residual, weight, scale)),
    )
    total = residual + norm(x, weight, 0.0, 0.1, 1.0)
    np.testing.assert_allclose(y, total * scale, atol=4e-6)
    dx, dresidual, dweight, dscale = vjp(jnp.float32(dy))
    np.testing.assert_allclose(dresidual, dy * scale, atol=1e-6)
    r = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1)
    dnorm = dy * scale * (weight + 1)
    expected = r * dnorm - x * r**3 * (dnorm * x).mean(-1, keepdims=True)
    np.testing.assert_allclose(dx, expected, atol=1e-5)
    np.testing.assert_allclose(dweight, (dy * scale * x * r).sum(0), atol=1e-5)
    expected = (dy * total).sum(0) if scale_shape == (33,) else (dy * total).sum()
    assert dscale.shape == scale_shape
    np.testing.assert_allclose(dscale, np.reshape(expected, scale_shape), atol=4e-5)


def test_a_python_number_scales_the_sum():
    x, residual = jnp.asarray([[3.0, 3.0]]), jnp.asarray([[1.0, 2.0]])
    y = rms_norm_add(x, residual, scale=0.5, eps=0.0)
    np.testing.assert_allclose(y, [[1.0, 1.5]], rtol=1e-6)


def test_the_norm_is_not_rounded_before_the_sum():
    x = jnp.asarray([[3.0, 4.0]], jnp.bfloat16)  # y = 3 sqrt(2) / 5, 4 sqrt(2) / 5
    y = rms_norm_add(x, jnp.full((1, 2), -1.0, jnp.float32), eps=0.0)
    assert y.dtype == jnp.float32  # that of the residual stream
    np.testing.assert_allclose(y, [[0.6 * 2**0.5 - 1, 0.8 * 2**0.5 - 1]], rtol=1e-5)


def test_large_half_precision_values_do_not_overflow():
    x = jnp.full((2, 8), 6e4, jnp.float16)
    np.testing.assert_array_equal(rms_norm_add(x, jnp.ones_like(x)), np.full((2, 8), 2))


def test_a_scale_of_another_size_is_refused():
    x = jnp.ones((2, 8))
    with pytest.raises(TypeError, match="rms_norm_add: dim `d` is 8 in `x` but 3"):
        rms_norm_add(x, x, scale=jnp.ones(3))
