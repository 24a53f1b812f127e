"""rms_norm_mul: formula and gradient, one rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import rms_norm_mul
from jaxkern.testing.checks import bf16, case, f16, f32
from tests.primitives.norm.test_rms_norm import formula as norm

CASES = [
    case("plain", x=f32(4, 2, 8), scale=f32(4, 2, 8), weight=f32(8), offset=1.0),
    case("no_weight", x=f16(3, 7), scale=f32(3, 7), eps=0.1),
    case("gemma", full=True, x=bf16(4, 2304), scale=bf16(4, 2304), weight=bf16(2304)),
]


def test_values_and_gradients_match_the_formula():
    rng = np.random.default_rng(0)
    x, scale, dy = rng.normal(size=(3, 5, 9))
    weight = rng.normal(size=9)
    y, vjp = jax.vjp(
        lambda *operands: rms_norm_mul(*operands, eps=0.1, offset=1.0),
        *map(jnp.float32, (x, scale, weight)),
    )
    normed = norm(x, weight, eps=0.1, offset=1.0)
    np.testing.assert_allclose(y, normed * scale, atol=4e-6)
    dx, dscale, dweight = vjp(jnp.float32(dy))
    np.testing.assert_allclose(dscale, dy * normed, atol=1e-5)
    r = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1)
    dxhat = dy * scale * (weight + 1)
    expected = r * dxhat - x * r**3 * (dxhat * x).mean(-1, keepdims=True)
    np.testing.assert_allclose(dx, expected, atol=2e-5)
    np.testing.assert_allclose(dweight, (dy * scale * x * r).sum(0), atol=2e-5)


def test_the_norm_is_not_rounded_before_the_product():
    x = jnp.asarray([[3.0, 4.0]], jnp.bfloat16)
    y = rms_norm_mul(x, jnp.full((1, 2), 7.0), eps=0.0)
    expected = np.float32([[4.2 * 2**0.5, 5.6 * 2**0.5]]).astype(jnp.bfloat16)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, expected)


def test_a_scale_of_another_shape_is_refused():
    with pytest.raises(TypeError, match="rms_norm_mul: the leading dims are"):
        rms_norm_mul(jnp.ones((2, 8)), jnp.ones(8))
