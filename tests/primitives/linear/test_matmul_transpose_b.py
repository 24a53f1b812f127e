"""matmul_transpose_b against NumPy's float64: groups, compute dtypes, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, linear, matmul_transpose_b
from jaxkern.testing.checks import bf16, case, f32

CASES = [
    case("grouped", x=f32(2, 4, 3, 8), w=f32(2, 2, 4, 8)),
    case("odd", x=bf16(3, 5, 7), w=bf16(1, 2, 7)),
    case("empty", x=f32(2, 0, 4), w=f32(2, 3, 4)),
    case("llama3_8b_scores", x=bf16(32, 128, 128), w=bf16(8, 512, 128), full=True),
]


def operands(*shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def test_a_block_of_matrices_shares_a_weight():
    x, w, dy = operands((6, 3, 8), (2, 4, 8), (6, 3, 4))
    w_of_each = np.repeat(w, 3, axis=0).astype(np.float64)  # 0 0 0 1 1 1
    y, vjp = jax.vjp(matmul_transpose_b, jnp.asarray(x), jnp.asarray(w))
    np.testing.assert_allclose(y, x @ w_of_each.swapaxes(1, 2), 1e-5, 1e-5)
    dx, dw = vjp(jnp.asarray(dy))
    np.testing.assert_allclose(dx, dy @ w_of_each, 1e-5, 1e-5)
    each = np.float64(dy).swapaxes(1, 2) @ x
    np.testing.assert_allclose(dw, each.reshape(2, 3, 4, 8).sum(1), 1e-5, 1e-5)


def test_one_matrix_and_one_weight_for_all():
    x, w = operands((5, 3, 8), (4, 8))
    y = matmul_transpose_b(jnp.asarray(x), jnp.asarray(w))
    np.testing.assert_allclose(y, x @ w.T, 1e-5, 1e-5)
    np.testing.assert_allclose(y, linear(jnp.asarray(x), jnp.asarray(w)), 1e-6, 1e-6)
    y0 = matmul_transpose_b(jnp.asarray(x[0]), jnp.asarray(w))
    np.testing.assert_allclose(y0, x[0] @ w.T, 1e-5, 1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_compute_dtype_rounds_both_operands_and_sums_in_float32(dtype):
    x, w, dy = operands((2, 3, 64), (2, 4, 64), (2, 3, 4))
    rounded = [a.astype(dtype).astype(np.float64) for a in (x, w, dy)]
    f = jax.jit(lambda x, w: matmul_transpose_b(x, w, compute_dtype=dtype))
    y, vjp = jax.vjp(f, jnp.asarray(x), jnp.asarray(w))
    dx, dw = vjp(jnp.asarray(dy))
    assert [a.dtype for a in (y, dx, dw)] == [jnp.float32] * 3
    expected = rounded[0] @ rounded[1].swapaxes(1, 2)
    np.testing.assert_allclose(y, expected, 1e-5, 1e-5)
    assert np.abs(y - x @ w.swapaxes(1, 2)).max() > 1e-4  # of the exact operands
    np.testing.assert_allclose(dx, rounded[2] @ rounded[1], 1e-5, 1e-5)
    dw_expected = rounded[2].swapaxes(1, 2) @ rounded[0]
    np.testing.assert_allclose(dw, dw_expected, 1e-5, 1e-5)


def test_float16_overflows_above_65504():
    x, w = jnp.full((1, 1), 7e4), jnp.ones((1, 1))
    assert matmul_transpose_b(x, w, compute_dtype="float16")[0, 0] == jnp.inf
    assert matmul_transpose_b(x, w)[0, 0] == 7e4


@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("w_dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_sums_in_float32_and_rounds_once(x_dtype, w_dtype):
    x, w = jnp.ones((1, 4096), x_dtype), jnp.full((2, 4096), 0.5, w_dtype)
    y = matmul_transpose_b(x, w)
    assert y.dtype == x_dtype
    np.testing.assert_array_equal(y, np.full((1, 2), 2048.0))


@pytest.mark.parametrize("kind", ["xla", "cpp"])
def test_the_sums_are_what_is_preferred(kind):
    """Results had the dtype of x in all tests."""
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in operands((1, 3, 64), (1, 4, 64)))
    exact = np.float64(np.float32(x)) @ np.float64(np.float32(w)).swapaxes(1, 2)

    def f(x, w):
        return matmul_transpose_b(x, w, preferred_element_type=jnp.float32)

    with backend(kind):
        y, vjp = jax.vjp(f, x, w)
        assert f(x, w).dtype == y.dtype == jnp.float32
        np.testing.assert_allclose(f(x, w), exact, 1e-5, 1e-5)
        same = matmul_transpose_b(x, w, preferred_element_type=jnp.bfloat16)
        np.testing.assert_array_equal(same, matmul_transpose_b(x, w))
    assert [g.dtype for g in vjp(y)] == [jnp.bfloat16] * 2
    with pytest.raises(TypeError, match="matmul_transpose_b: `preferred_element_type`"):
        matmul_transpose_b(x, w, preferred_element_type=jnp.int32)


def test_precision_reaches_the_product():
    x = jnp.ones((2, 3))
    text = jax.jit(lambda x: matmul_transpose_b(x, x, precision="highest")).lower(x)
    assert "precision = [HIGHEST, HIGHEST]" in text.as_text()


def test_errors_say_what_to_do():
    x = jnp.ones((3, 2, 4))
    with pytest.raises(TypeError, match=r"dim `k\*g` of `x` is 3, not a multiple of 2"):
        matmul_transpose_b(x, jnp.ones((2, 5, 4)))
    with pytest.raises(TypeError, match="dim `d` is 4 in `x` but 5 in `w`"):
        matmul_transpose_b(x, jnp.ones((3, 2, 5)))
    with pytest.raises(ValueError, match="`precision` must be 'default', 'high'"):
        matmul_transpose_b(x, x, precision="tf32")


@pytest.mark.parametrize("lead", [(), (2,), (3, 2), (2, 3, 2)])
def test_one_matrix_for_an_x_of_any_rank(lead):
    """The docstring said it; the tests stopped at three dims of x."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(*lead, 4, 8)), rng.normal(size=(5, 8))
    y, pull = jax.vjp(matmul_transpose_b, jnp.float32(x), jnp.float32(w))
    np.testing.assert_allclose(y, x @ w.T, rtol=1e-4, atol=1e-5)
    dy = rng.normal(size=y.shape)
    dx, dw = pull(jnp.float32(dy))
    np.testing.assert_allclose(dx, dy @ w, rtol=1e-4, atol=1e-5)
    expected = np.einsum("ntf,ntd->fd", dy.reshape(-1, 4, 5), x.reshape(-1, 4, 8))
    np.testing.assert_allclose(dw, expected, rtol=1e-4, atol=1e-5)
