"""top_k against a stable sort: order, ties, signed zeros, NaN, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.primitives.index.top_k import top_k
from tests.checks import bf16, case, f32

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


@pytest.mark.parametrize("k", [-1, 4])
def test_errors_say_what_to_do(k):
    with pytest.raises(ValueError, match=f"top_k: `k` must lie between 0 .* got {k}"):
        top_k(jnp.ones((2, 3)), k)
