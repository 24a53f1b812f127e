"""scatter_add against NumPy loops: repeats, bounds, one order of the sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import gather, scatter_add, take_along_axis
from jaxkern.testing.checks import bf16, case, f32, i32

CASES = [
    case(
        "plain",
        x=f32(2, 6, 4),
        indices=i32(4, low=-1, high=7),
        updates=f32(2, 4, 4),
        clip=False,
    ),
    case("none", x=f32(5, 3), indices=i32(0), updates=f32(0, 3), clip=False),
    case(
        "clip",
        x=bf16(2, 3),
        indices=i32(3, low=-1, high=4),
        updates=bf16(3, 3),
        clip=True,
        full=True,
    ),
]


@pytest.mark.parametrize(
    "axis, out_of_bounds", [(0, "drop"), (1, "clip"), (-1, "drop")]
)
def test_values_and_gradients_match_the_loop(axis, out_of_bounds):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4, 5)).astype(np.float32)
    indices = rng.integers(-2, 7, 20).astype(np.int32)
    shape = list(x.shape)
    shape[axis] = 20
    updates = rng.standard_normal(shape).astype(np.float32)
    rows = np.moveaxis(x.astype(np.float64), axis, 0)  # written to below
    v = len(rows)
    for i, row in zip(indices, np.moveaxis(updates, axis, 0), strict=True):
        if out_of_bounds == "clip" or 0 <= i < v:
            rows[min(max(i, 0), v - 1)] += row

    def f(x, updates):
        return scatter_add(
            x, jnp.asarray(indices), updates, axis=axis, out_of_bounds=out_of_bounds
        )

    y, vjp = jax.vjp(f, jnp.asarray(x), jnp.asarray(updates))
    np.testing.assert_allclose(y, np.moveaxis(rows, 0, axis), 1e-5, 1e-5)
    dx, dupdates = vjp(2 * y)
    np.testing.assert_array_equal(dx, 2 * y)
    policy = "clip" if out_of_bounds == "clip" else "zeros"
    taken = gather(2 * y, jnp.asarray(indices), axis=axis, out_of_bounds=policy)
    np.testing.assert_array_equal(dupdates, taken)


def test_indices_of_any_shape():
    indices = jnp.asarray([[0, 2], [2, 2]])
    updates = jnp.arange(1.0, 5).reshape(2, 2)
    y = scatter_add(jnp.zeros(3), indices, updates)
    np.testing.assert_array_equal(y, [1, 0, 9])


def test_every_update_counts_where_assigning_keeps_the_last():
    indices = jnp.asarray([1, 1, 1])
    y = scatter_add(jnp.zeros((2, 1)), indices, jnp.asarray([[1.0], [2.0], [4.0]]))
    np.testing.assert_array_equal(y, [[0], [7]])


def test_the_order_of_the_sum_depends_on_the_indices_alone():
    """A row's sum has the same bits whatever is added to other rows, and in any jit."""
    rng = np.random.default_rng(0)
    indices = rng.integers(0, 3, 999).astype(np.int32)
    updates = rng.standard_normal((999, 2)).astype(np.float32)
    f = jax.jit(scatter_add)
    first = np.asarray(f(jnp.zeros((3, 2)), indices, updates))
    changed = np.where((indices == 1)[:, None], updates, 7 * updates)
    again = np.asarray(f(jnp.zeros((3, 2)), indices, changed))
    np.testing.assert_array_equal(first[1], again[1])


def test_the_only_scatter_has_unique_indices():
    """So that the order of its adds, which is free on a GPU, does not matter."""
    x, indices = jnp.ones((3, 2)), jnp.asarray([0, 2, 0])
    for f in (
        lambda x: scatter_add(x, indices, x),
        jax.grad(lambda x: gather(x, indices).sum()),
        jax.grad(lambda x: take_along_axis(x.T, indices[None].repeat(2, 0)).sum()),
    ):
        text = jax.jit(f).lower(x).as_text()
        assert text.count('"stablehlo.scatter"(') == 1
        assert text.count("unique_indices = true") == 1


def test_the_sum_is_a_tree():
    """Sums of 2**k equal numbers are exact; a running sum of 0.1 would not be."""
    y = scatter_add(jnp.zeros(1), jnp.zeros(64, jnp.int32), jnp.full(64, 0.1))
    np.testing.assert_array_equal(y, [np.float32(0.1) * 64])


def test_bfloat16_sums_in_float32():
    x, updates = jnp.full((1, 1), 256, jnp.bfloat16), jnp.ones((256, 1), jnp.bfloat16)
    y = scatter_add(x, jnp.zeros(256, jnp.int32), updates)
    assert y.dtype == jnp.bfloat16 and y[0, 0] == 512


def test_dtypes_promote():
    x, updates = jnp.ones((2, 1), jnp.bfloat16), jnp.float32([[2.0**-12]])
    y, vjp = jax.vjp(
        lambda x, u: scatter_add(x, jnp.zeros(1, jnp.int32), u), x, updates
    )
    assert y.dtype == jnp.float32 and y[0, 0] == 1 + 2.0**-12
    assert [g.dtype for g in vjp(y)] == [jnp.bfloat16, jnp.float32]


def test_nan_and_infinities_stay_in_their_row():
    updates = jnp.asarray([[jnp.nan], [1.0], [jnp.inf], [2.0]])
    y = scatter_add(jnp.zeros((4, 1)), jnp.asarray([0, 1, 2, 1]), updates)
    np.testing.assert_array_equal(y[:, 0], [np.nan, 3, np.inf, 0])


def test_errors_say_what_to_do():
    x, indices = jnp.ones((2, 3)), jnp.zeros(4, jnp.int32)
    with pytest.raises(TypeError, match=r"scatter_add: `updates` must have shape \(4,"):
        scatter_add(x, indices, jnp.ones((3, 3)))
    with pytest.raises(ValueError, match="scatter_add: `out_of_bounds` must be 'drop'"):
        scatter_add(x, indices, jnp.ones((4, 3)), out_of_bounds="zeros")
