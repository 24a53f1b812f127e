"""top_k against a stable sort: order, ties, signed zeros, NaN, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.primitives.index.top_k import top_k
from jaxkern.testing.checks import bf16, case, f32

CASES = [
    case("llama3_vocab", x=bf16(4, 128256), k=40),
    case("moe_router", x=f32(64, 128), k=8),
    case("odd", x=f32(3, 7, 13), k=5),
    case("even", x=f32(8, 16), k=16),
    case("row", x=f32(5), k=1),
    case("none", x=f32(3, 4), k=0),
    case("empty_rows", x=f32(0, 4), k=2),
]
INF, NAN = np.inf, np.nan


def oracle(row, k):
    """Indices by falling value, NaN first; Python's sort is stable."""
    rank = [INF if np.isnan(v) else v for v in row]
    order = sorted(range(len(row)), key=lambda i: (not np.isnan(row[i]), -rank[i]))
    return order[:k]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_with_ties_nan_and_infinities(dtype):
    rng = np.random.default_rng(0)
    values = [NAN, INF, -INF, 0.0, -0.0, 1.0, 2.0]
    rows = rng.choice(values, (200, 6), p=[0.1, 0.1, 0.2, 0.2, 0.2, 0.1, 0.1])
    rows = np.where(np.isnan(rows) & (rng.random(rows.shape) < 0.5), -NAN, rows)
    x = jnp.asarray(rows, dtype)
    for f in (top_k, jax.jit(top_k, static_argnums=1)):
        values, indices = f(x, 4)
        assert values.dtype == dtype and indices.dtype == jnp.int32
        expected = np.asarray([oracle(row, 4) for row in rows])
        np.testing.assert_array_equal(indices, expected)
        picked = np.take_along_axis(rows, expected, -1)
        np.testing.assert_array_equal(np.float64(values), picked)
        np.testing.assert_array_equal(np.signbit(values), np.signbit(picked))


def test_axis():
    x = jax.random.normal(jax.random.key(0), (3, 4, 5))
    values, indices = top_k(x, 2, axis=1)
    assert values.shape == indices.shape == (3, 2, 5)
    expected = np.sort(x, 1)[:, ::-1][:, :2]
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(
        np.take_along_axis(np.asarray(x), indices, 1), expected
    )


def test_the_gradient_goes_to_the_picked_places():
    x = jnp.asarray([[3.0, 1.0, 2.0], [5.0, 5.0, 5.0]])
    weights = jnp.asarray([1.0, 10.0])
    grad = jax.grad(lambda x: (top_k(x, 2)[0] * weights).sum())(x)
    np.testing.assert_array_equal(grad, [[1, 0, 10], [1, 10, 0]])
    (values, _), (dvalues, dindices) = jax.jvp(lambda x: top_k(x, 2), (x,), (2 * x,))
    np.testing.assert_array_equal(dvalues, 2 * values)
    assert dindices.dtype == jax.dtypes.float0


@pytest.mark.parametrize("axis", [-1, 0])
def test_a_row_ends_at_its_length(axis):
    """The padding holds NaN and inf, which would come first, and -inf is an element."""
    rng = np.random.default_rng(1)
    rows = rng.choice([NAN, INF, -INF, 0.0, 1.0, 2.0], (60, 6))
    lengths = rng.integers(-1, 8, 60)
    x = jnp.asarray(np.moveaxis(rows, -1, axis), jnp.float32)
    f = jax.jit(lambda x, n: top_k(x, 4, axis=axis, lengths=n))
    found = f(x, jnp.asarray(lengths))
    values, indices = (np.moveaxis(np.asarray(y), axis, -1) for y in found)
    for row, n, v, i in zip(rows, lengths, values, indices, strict=True):
        expected = oracle(row[: max(n, 0)], 4)
        absent = 4 - len(expected)
        np.testing.assert_array_equal(i, [*expected, *[-1] * absent])
        np.testing.assert_array_equal(v, [*row[expected], *[-INF] * absent])
    same = top_k(x, 4, axis=axis, lengths=3)
    for a, b in zip(same, f(x, jnp.full(60, 3)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_elements_behind_the_length_have_no_gradient():
    x = jnp.asarray([[1.0, 3.0, 9.0], [1.0, 3.0, 9.0]])

    def f(x, lengths):
        values = top_k(x, 2, lengths=lengths)[0]
        return jnp.where(jnp.isfinite(values), values, 0).sum()

    grad = jax.grad(f)(x, jnp.asarray([2, 0]))
    np.testing.assert_array_equal(grad, [[1, 1, 0], [0, 0, 0]])


def test_lengths_of_another_shape_are_refused():
    with pytest.raises(TypeError, match=r"top_k: `lengths` must .* \(2,\), got shape"):
        top_k(jnp.ones((2, 3)), 1, lengths=jnp.ones((2, 1), jnp.int32))


@pytest.mark.parametrize("k", [-1, 4])
def test_errors_say_what_to_do(k):
    with pytest.raises(ValueError, match=f"top_k: `k` must lie between 0 .* got {k}"):
        top_k(jnp.ones((2, 3)), k)
