"""gather and its gradient against NumPy loops: axes, bounds, repeats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import embedding, gather
from jaxkern.testing.checks import bf16, case, f32, i32
from jaxkern.testing.sharding_checks import mesh_of

CASES = [
    case("plain", x=f32(2, 6, 4), indices=i32(4, low=-1, high=7), clip=False),
    case("clip", x=bf16(2, 3), indices=i32(3, low=-1, high=4), clip=True),
    case("no_indices", x=f32(5, 3), indices=i32(0), clip=False),
    case("moe_tokens", x=bf16(4096, 1024), indices=i32(8192), clip=False, full=True),
]


def oracle(x, indices, axis, clip):
    """(y, gradient), the gradient for dy = y."""
    rows = np.moveaxis(np.asarray(x, np.float64), axis, 0)
    y = np.zeros((indices.size, *rows.shape[1:]))
    dx = np.zeros_like(rows)
    for n, i in enumerate(indices.ravel().tolist()):
        if clip or 0 <= i < len(rows):
            i = min(max(i, 0), len(rows) - 1)
            y[n] = rows[i]
            dx[i] += rows[i]
    y = y.reshape(*indices.shape, *rows.shape[1:])
    front = tuple(range(indices.ndim))
    y = np.moveaxis(y, front, tuple(axis % x.ndim + k for k in front))
    return y, np.moveaxis(dx, 0, axis)


@pytest.mark.parametrize(
    "axis, out_of_bounds", [(0, "zeros"), (1, "clip"), (2, "clip"), (-1, "zeros")]
)
def test_values_and_gradients_match_the_loop(axis, out_of_bounds):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4, 5)).astype(np.float32)
    indices = rng.integers(-2, 7, (2, 6)).astype(np.int32)
    y, vjp = jax.vjp(
        lambda x: gather(
            x, jnp.asarray(indices), axis=axis, out_of_bounds=out_of_bounds
        ),
        jnp.asarray(x),
    )
    expected, dx = oracle(x, indices, axis, out_of_bounds == "clip")
    np.testing.assert_array_equal(y, expected.astype(np.float32))
    np.testing.assert_allclose(vjp(y)[0], dx, 1e-6, 1e-6)


def test_a_scalar_index_takes_one_slice():
    x = jnp.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(gather(x, jnp.int32(2), axis=1), x[:, 2])


def test_rows_of_a_table_are_its_embedding():
    table = jnp.asarray(np.random.default_rng(0).standard_normal((5, 3)), jnp.float32)
    ids = jnp.asarray([[0, 4], [-1, 5]])
    for policy in ("zeros", "clip"):
        y = gather(table, ids, out_of_bounds=policy)
        expected = embedding(ids, table, out_of_bounds=policy)
        np.testing.assert_array_equal(y, expected)


def test_inside_the_axis_it_is_jnp_take():
    x = jnp.arange(24.0).reshape(2, 3, 4)
    indices = jnp.asarray([2, 0, 2])
    for axis in (1, -1):
        expected = jnp.take(x, indices, axis=axis)
        np.testing.assert_array_equal(gather(x, indices, axis=axis), expected)


def test_a_frequent_index_loses_nothing_in_bfloat16():
    indices, x = jnp.zeros(512, jnp.int32), jnp.ones((2, 1), jnp.bfloat16)
    grad = jax.grad(lambda x: gather(x, indices).astype(jnp.float32).sum())(x)
    np.testing.assert_array_equal(np.float32(grad), [[512], [0]])


@pytest.mark.parametrize("cut", ["x", "indices"])
def test_the_gradient_on_an_explicit_mesh(cut):
    x = jnp.arange(24.0).reshape(6, 4)
    indices = jnp.asarray([5, 0, 5, -1])

    def grad(x, indices):
        return jax.grad(lambda x: (gather(x, indices) ** 2).sum())(x)

    mesh = mesh_of(2, AxisType.Explicit)
    with jax.set_mesh(mesh):
        x_cut = P(None, "m") if cut == "x" else P()
        indices_cut = P("m") if cut == "indices" else P()
        dx = jax.jit(grad)(
            jax.device_put(x, NamedSharding(mesh, x_cut)),
            jax.device_put(indices, NamedSharding(mesh, indices_cut)),
        )
    np.testing.assert_array_equal(dx, grad(x, indices))


def test_an_empty_axis_gives_zeros():
    y, vjp = jax.vjp(lambda x: gather(x, jnp.asarray([0, 3])), jnp.ones((0, 2)))
    np.testing.assert_array_equal(y, jnp.zeros((2, 2)))
    assert vjp(y)[0].shape == (0, 2)


def test_errors_say_what_to_do():
    x, indices = jnp.ones((2, 3)), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="gather: `out_of_bounds` must be one of"):
        gather(x, indices, out_of_bounds="fill")
    with pytest.raises(ValueError, match="gather: `axis` must name one of the 2 dims"):
        gather(x, indices, axis=2)
    with pytest.raises(TypeError, match="gather: `indices` must have a dtype of kind"):
        gather(x, jnp.zeros(1))
