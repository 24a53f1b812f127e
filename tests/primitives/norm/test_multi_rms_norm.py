"""multi_rms_norm: the formula and gradient for two and three weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import explain, multi_rms_norm, rms_norm
from jaxkern.testing.checks import bf16, case, f32
from tests.primitives.norm.test_rms_norm import formula as norm

GEMMA = dict(eps=1e-6, offset=1.0)
PLAIN = dict(eps=0.1, offset=0.0)
CASES = {
    "dual_rms_norm": [
        case("plain", x=f32(4, 2, 8), weight1=f32(8), weight2=f32(8), **PLAIN),
        case(
            "one_weight",
            full=True,
            x=bf16(3, 7),
            weight1=None,
            weight2=bf16(7),
            **GEMMA,
        ),
    ],
    "triple_rms_norm": [
        case(
            "plain",
            x=f32(4, 2, 8),
            weight1=f32(8),
            weight2=f32(8),
            weight3=f32(8),
            **GEMMA,
        ),
        case(
            "two_weights",
            full=True,
            x=bf16(3, 7),
            weight1=bf16(7),
            weight2=f32(7),
            weight3=None,
            **PLAIN,
        ),
        case(
            "gemma4_26b",
            full=True,
            x=bf16(4, 2816),
            weight1=bf16(2816),
            weight2=bf16(2816),
            weight3=None,
            **PLAIN,
        ),
    ],
}


@pytest.mark.parametrize("number", [2, 3])
def test_values_and_gradients_match_the_formula(number):
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(5, 9)), [*rng.normal(size=(number - 1, 9)), None]
    dys = rng.normal(size=(number, 5, 9))
    ys, vjp = jax.vjp(
        lambda x, *weights: multi_rms_norm(x, *weights, eps=0.1, offset=1.0),
        *(None if a is None else jnp.float32(a) for a in (x, *weights)),
    )
    scales = [1.0 if w is None else w + 1 for w in weights]
    assert len(ys) == number
    for y, scale in zip(ys, scales, strict=True):
        np.testing.assert_allclose(y, norm(x, eps=0.1) * scale, atol=4e-6)

    dx, *dweights = vjp(tuple(jnp.float32(dys)))
    r = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1)
    dxhat = sum(dy * scale for dy, scale in zip(dys, scales, strict=True))
    expected = r * dxhat - x * r**3 * (dxhat * x).mean(-1, keepdims=True)
    np.testing.assert_allclose(dx, expected, atol=1e-5)
    for dweight, dy in zip(dweights[:-1], dys, strict=False):
        np.testing.assert_allclose(dweight, (dy * x * r).sum(0), atol=1e-5)
    assert dweights[-1] is None


def test_each_result_is_rms_norm_to_the_last_bit():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(3, 8)), jnp.bfloat16)
    weights = list(jnp.asarray(rng.normal(size=(3, 8)), jnp.bfloat16))
    for y, weight in zip(multi_rms_norm(x, *weights), weights, strict=True):
        assert y.dtype == jnp.bfloat16
        np.testing.assert_array_equal(y, rms_norm(x, weight))


def test_a_second_dtype_and_layout_are_a_cast_and_a_transpose():
    """float32 and, permuted to [heads, tokens, d], bfloat16 of one norm."""
    x = np.float32(np.random.default_rng(2).normal(size=(3, 2, 8)))
    y = rms_norm(jnp.asarray(x))
    permuted = jnp.swapaxes(y.astype(jnp.bfloat16), 0, 1)
    expected = np.swapaxes(np.float32(norm(x)).astype(jnp.bfloat16), 0, 1)
    np.testing.assert_array_equal(permuted, expected)


def test_it_is_one_op_forward_and_backward():
    def loss(x, w):
        return sum(y.sum() for y in multi_rms_norm(x, w, w, w))

    rows = explain(jax.grad(loss, (0, 1)), jnp.ones((2, 8)), jnp.ones(8)).rows
    assert [row.op for row in rows] == ["triple_rms_norm_fwd", "triple_rms_norm_bwd"]


def test_every_error_says_what_to_do():
    x, w = jnp.ones((2, 8)), jnp.ones(8)
    with pytest.raises(TypeError, match="takes 2 or 3 weights, got 1"):
        multi_rms_norm(x, w)
    with pytest.raises(TypeError, match="triple_rms_norm: dim `d` is 8 in `x` but 3"):
        multi_rms_norm(x, w, w, w[:3])
