"""linear: one formula for dense and quantised weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import linear
from jaxkern.testing.checks import bf16, case, f16, f32
from tests.primitives.quant.block_bytes import weight

SUMS = jnp.dtype("float32")
PLAIN = {"compute_dtype": None, "precision": None, "preferred_element_type": SUMS}
CASES = [  # of the primitive, which multiplies with narrow weights
    case("plain", x=f32(2, 3, 8), w=bf16(5, 8), **PLAIN),
    case("odd", x=bf16(7), w=bf16(3, 7), **PLAIN),
    case("empty", x=f16(0, 4), w=f16(2, 4), **PLAIN),
    case("smollm2_down", x=f32(9, 1536), w=f16(576, 1536), full=True, **PLAIN),
]
X = np.random.default_rng(1).normal(size=(2, 3, 64)).astype(np.float32)
BIAS = np.linspace(-5, 5, 8, dtype=np.float32)


@pytest.mark.parametrize("bias", [None, BIAS], ids=["no_bias", "bias"])
@pytest.mark.parametrize("quantised", [False, True])
def test_formula(quantised, bias):
    packed, values = weight("Q8_0", 8, 64)
    w = packed if quantised else jnp.asarray(values, jnp.float32)
    y = jax.jit(linear)(X, w, bias)
    expected = X.astype(np.float64) @ values.T + (0 if bias is None else bias)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("w_dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_sums_in_float32_and_rounds_once(x_dtype, w_dtype):
    x = jnp.ones((1, 4096), x_dtype)
    w = jnp.full((2, 4096), 0.5, w_dtype)
    y = linear(x, w, jnp.full(2, 2.0))  # 2050: bfloat16 sums would stop far below
    assert y.dtype == x_dtype
    np.testing.assert_array_equal(y, np.full((1, 2), 2050.0).astype(x_dtype))


def test_gradients_of_a_dense_layer():
    w = np.random.default_rng(2).normal(size=(8, 64)).astype(np.float32)
    dy = np.random.default_rng(3).normal(size=(2, 3, 8)).astype(np.float32)
    dx, dw, dbias = jax.vjp(linear, X, w, BIAS)[1](jnp.asarray(dy))
    np.testing.assert_allclose(dx, dy @ w, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dw, np.einsum("btf,btd->fd", dy, X), atol=1e-4)
    np.testing.assert_allclose(dbias, dy.sum((0, 1)), atol=1e-5)


def test_refusals():
    with pytest.raises(TypeError, match=r"got \(2, 3, 64\) and \(8, 32\)"):
        linear(X, jnp.ones((8, 32)))
    with pytest.raises(TypeError, match=r"`bias` must have shape \(8,\), got \(1,\)"):
        linear(X, jnp.ones((8, 64)), jnp.ones(1))


def test_the_sums_are_what_is_preferred():
    """Results had the dtype of x in all tests but those of policies."""
    rows = jnp.asarray(X.reshape(-1, 64), jnp.bfloat16)
    x, w = rows[:3], rows[1:6]
    y = linear(x, w, preferred_element_type=jnp.float32)
    assert y.dtype == jnp.float32
    exact = np.float64(np.float32(x)) @ np.float64(np.float32(w)).T
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)
    assert linear(x, w).dtype == jnp.bfloat16
    packed, _ = weight("Q8_0", 5, 64)
    assert linear(x, packed, preferred_element_type="float32").dtype == jnp.float32
    with pytest.raises(TypeError, match="`preferred_element_type` must be a float"):
        linear(x, w, preferred_element_type=jnp.int32)


@pytest.mark.parametrize("f", [3, 4096], ids=["few", "many"])
def test_products_of_bfloat16_are_rounded_once_and_their_gradients_are_narrow(f):
    """Tests of values could not see it: products of float32, to which XLA widened the
    cotangents, give the same numbers at half the rate of a GPU."""
    rng = np.random.default_rng(4)
    draw = lambda *s: jnp.asarray(rng.standard_normal(s), jnp.bfloat16)  # noqa: E731
    x, w, dy = draw(5, 3000), draw(f, 3000), draw(5, f)

    def both(x, w, dy):
        y, pull = jax.vjp(linear, x, w)
        return y, *pull(dy)

    traced = jax.jit(both).trace(x, w, dy)
    products = [e for e in traced.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert len(products) == 3
    assert {v.aval.dtype for e in products for v in (*e.invars, *e.outvars)} == {
        jnp.dtype("bfloat16")
    }
    x32, w32, dy32 = (np.float64(np.float32(a)) for a in (x, w, dy))
    exact = (x32 @ w32.T, dy32 @ w32, dy32.T @ x32)
    for found, expected in zip(traced.lower().compile()(x, w, dy), exact, strict=True):
        error = np.abs(np.float64(np.float32(found)) - expected)
        assert error.max() <= 2**-8 * np.abs(expected).max() * 1.01  # half a unit
