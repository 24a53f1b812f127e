"""Masked softmax against its formula in NumPy float64, and its edge cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.primitives.activation.softmax import softmax
from jaxkern.testing.checks import bf16, boolean, case, f32

CASES = {
    "softmax": [
        case("llama3_8b_scores", x=bf16(2, 32, 4, 512), mask=boolean(2, 32, 4, 512)),
        case("odd", x=f32(3, 7, 13), mask=boolean(3, 7, 13), scale=0.3),
        case("even_unmasked", x=f32(8, 2, 16), mask=None),
        case("sparse", x=f32(16, 4), mask=boolean(16, 4, probability=0.2)),
        case("row", x=f32(5), mask=boolean(5)),
        case("empty_rows", x=f32(0, 4), mask=None),
        case("empty_dim", x=f32(4, 0), mask=None),
    ],
    "softcap_softmax": [
        case("odd", x=f32(3, 7, 13), mask=boolean(3, 7, 13), scale=0.3, softcap=2.0),
        case("gemma2_scores", x=bf16(2, 8, 4, 16), mask=None, scale=9.0, softcap=50.0),
        case("empty_dim", x=f32(4, 0), mask=None, scale=1.0, softcap=1.0),
        case("long", full=True, x=bf16(9, 4096), mask=None, scale=4.0, softcap=5.0),
    ],
}


def formula(x, mask, scale, axis=-1):
    weight = np.where(mask, np.exp(scale * x), 0)
    total = weight.sum(axis, keepdims=True)
    return np.divide(weight, total, out=np.zeros_like(weight), where=total > 0)


def operands():
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 3, 6, 9))
    mask = rng.random((3, 6, 9)) < 0.6
    mask[1, 2] = False
    return x, mask, dy


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("scale", [1.0, -0.7, 2.5])
def test_values_and_gradients_match_the_formula(axis, scale):
    x, mask, dy = operands()
    y = formula(x, mask, scale, axis)
    dx = scale * y * (dy - (y * dy).sum(axis, keepdims=True))
    actual, vjp = jax.vjp(
        lambda x: softmax(x, jnp.asarray(mask), scale=scale, axis=axis),
        jnp.asarray(x, jnp.float32),
    )
    np.testing.assert_allclose(actual, y, 1e-5, 1e-7)
    (grad,) = vjp(jnp.asarray(dy, jnp.float32))
    np.testing.assert_allclose(grad, dx, 1e-5, 1e-6)


@pytest.mark.parametrize("scale, cap", [(1.0, 0.5), (-0.7, 2.0), (3.0, 30.0)])
def test_a_softcap_bounds_what_is_summed(scale, cap):
    x, mask, dy = operands()
    z = cap * np.tanh(scale * x / cap)
    y = formula(z, mask, 1.0)
    dx = y * (dy - (y * dy).sum(-1, keepdims=True)) * scale * (1 - (z / cap) ** 2)
    actual, vjp = jax.vjp(
        lambda x: softmax(x, jnp.asarray(mask), scale=scale, softcap=cap),
        jnp.asarray(x, jnp.float32),
    )
    np.testing.assert_allclose(actual, y, 1e-5, 1e-7)
    (grad,) = vjp(jnp.asarray(dy, jnp.float32))
    np.testing.assert_allclose(grad, dx, 1e-5, 1e-6)


def test_a_softcap_sees_infinities_and_no_hidden_nan():
    inf, nan = jnp.inf, jnp.nan
    x = jnp.asarray([[nan, 0.0, 0.0], [nan, inf, -inf]])
    mask = jnp.asarray([False, True, True])
    y, vjp = jax.vjp(lambda x: softmax(x, mask, softcap=1.0), x)
    far = 1 / (1 + np.exp(-2))
    np.testing.assert_allclose(y, [[0, 0.5, 0.5], [0, far, 1 - far]], 1e-6)
    (dx,) = vjp(jnp.asarray([[9.0, 1, 2]] * 2))
    np.testing.assert_allclose(dx, [[0, -0.25, 0.25], [0, 0, 0]], atol=1e-7)
    assert np.isnan(softmax(x, softcap=1.0)).all()


@pytest.mark.parametrize("mask_shape", [(9,), (6, 9), (3, 1, 9), (3, 6, 1), ()])
def test_a_mask_broadcasts(mask_shape):
    x, _, _ = operands()
    mask = np.random.default_rng(1).random(mask_shape) < 0.7
    expected = formula(x, np.broadcast_to(mask, x.shape), 1.0)
    actual = softmax(jnp.asarray(x, jnp.float32), jnp.asarray(mask))
    np.testing.assert_allclose(actual, expected, 1e-5, 1e-7)


def test_rows_without_an_element_are_zero_with_zero_gradients():
    x = jnp.asarray([[-jnp.inf] * 3, [1.0, 2.0, 3.0], [0.0, -jnp.inf, 0.0]])
    mask = jnp.asarray([[True] * 3, [False] * 3, [True] * 3])
    y, vjp = jax.vjp(lambda x: softmax(x, mask), x)
    np.testing.assert_allclose(y, [[0, 0, 0], [0, 0, 0], [0.5, 0, 0.5]])
    (dx,) = vjp(jnp.asarray([[1.0, 2.0, 3.0]] * 3))
    np.testing.assert_allclose(dx, [[0, 0, 0], [0, 0, 0], [-0.5, 0, 0.5]], atol=1e-7)
    dy = jax.jvp(lambda x: softmax(x, mask), (x,), (jnp.ones_like(x),))[1]
    np.testing.assert_allclose(dy, jnp.zeros((3, 3)), atol=1e-7)


def test_an_unmasked_row_of_minus_inf_is_zero_where_jax_gives_nan():
    x = jnp.full((2, 3), -jnp.inf)
    np.testing.assert_array_equal(softmax(x), jnp.zeros((2, 3)))
    assert np.isnan(jax.nn.softmax(x)).all()


def test_large_values_do_not_overflow():
    y = softmax(jnp.asarray([3e38, 3e38, -3e38]))
    np.testing.assert_array_equal(y, [0.5, 0.5, 0])
    y = softmax(jnp.asarray([6e4, 6e4, -6e4], jnp.float16), scale=8.0)
    np.testing.assert_array_equal(y, [0.5, 0.5, 0])


def test_nan_is_seen_only_where_it_is_kept():
    x = jnp.asarray([[jnp.nan, 0.0, 0.0], [jnp.inf, 0.0, 0.0]])
    mask = jnp.asarray([False, True, True])
    np.testing.assert_array_equal(softmax(x, mask), [[0, 0.5, 0.5]] * 2)
    (dx,) = jax.vjp(lambda x: softmax(x, mask), x)[1](jnp.asarray([[9.0, 1, 2]] * 2))
    np.testing.assert_array_equal(dx, [[0, -0.25, 0.25]] * 2)
    assert np.isnan(softmax(x)).all(-1).all()


def test_errors_say_what_to_do():
    with pytest.raises(
        TypeError, match=r"softmax: `mask` of shape \(4,\) must broadcast"
    ):
        softmax(jnp.ones((2, 3)), jnp.ones(4, bool))
    with pytest.raises(ValueError, match="softmax: `softcap` must be positive"):
        softmax(jnp.ones((2, 3)), softcap=0.0)
    with pytest.raises(
        TypeError, match="softmax: `mask` must have a dtype of kind Bool"
    ):
        softmax(jnp.ones((2, 3)), jnp.ones(3))
