"""take_along_axis and its gradient against NumPy loops: axes, bounds, repeats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import take_along_axis
from jaxkern.testing.checks import bf16, case, f32, i32

CASES = [
    case("plain", x=f32(2, 6), indices=i32(2, 4, low=-1, high=7), clip=False),
    case("clip", x=bf16(8, 3), indices=i32(8, 5, low=-2, high=5), clip=True),
    case("no_indices", x=f32(3, 5), indices=i32(3, 0), clip=False),
    case("labels", x=bf16(512, 32000), indices=i32(512, 1), clip=False, full=True),
]


@pytest.mark.parametrize(
    "axis, out_of_bounds", [(0, "clip"), (1, "zeros"), (-1, "clip")]
)
def test_values_and_gradients_match_the_loop(axis, out_of_bounds):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4, 5)).astype(np.float32)
    shape = list(x.shape)
    shape[axis] = 9
    indices, dy = rng.integers(-2, 7, shape), rng.standard_normal(shape)
    v = x.shape[axis]
    y, dx = np.zeros(shape), np.zeros(x.shape)
    for at in np.ndindex(*shape):
        i = indices[at]
        if out_of_bounds == "clip" or 0 <= i < v:
            place = list(at)
            place[axis] = min(max(i, 0), v - 1)
            y[at] = x[tuple(place)]
            dx[tuple(place)] += dy[at]
    actual, vjp = jax.vjp(
        lambda x: take_along_axis(
            x, jnp.asarray(indices, jnp.int32), axis=axis, out_of_bounds=out_of_bounds
        ),
        jnp.asarray(x),
    )
    np.testing.assert_array_equal(actual, y.astype(np.float32))
    np.testing.assert_allclose(vjp(jnp.asarray(dy, jnp.float32))[0], dx, 1e-5, 1e-6)


def test_the_gradient_of_a_repeated_index_adds():
    """Assigning would keep the last dy alone."""
    indices = jnp.asarray([[1, 1, 1]])
    dx = jax.vjp(lambda x: take_along_axis(x, indices), jnp.ones((1, 2)))[1]
    np.testing.assert_array_equal(dx(jnp.asarray([[1.0, 2.0, 4.0]]))[0], [[0, 7]])


def test_inside_the_axis_it_is_jax_s():
    x = jnp.arange(12.0).reshape(3, 4)
    indices = jnp.asarray([[3, 0], [1, 1], [0, 2]])
    expected = jnp.take_along_axis(x, indices, axis=1)
    np.testing.assert_array_equal(take_along_axis(x, indices), expected)


def test_an_empty_axis_gives_zeros():
    indices = jnp.zeros((2, 3), jnp.int32)
    y, vjp = jax.vjp(lambda x: take_along_axis(x, indices), jnp.ones((2, 0)))
    np.testing.assert_array_equal(y, jnp.zeros((2, 3)))
    assert vjp(y)[0].shape == (2, 0)


def test_errors_say_what_to_do():
    x = jnp.ones((2, 3))
    with pytest.raises(TypeError, match="`indices` must have the 2 dims of `x`"):
        take_along_axis(x, jnp.zeros(3, jnp.int32))
    with pytest.raises(TypeError, match="take_along_axis: the leading dims are"):
        take_along_axis(x, jnp.zeros((1, 3), jnp.int32))
    with pytest.raises(ValueError, match="`out_of_bounds` must be one of"):
        take_along_axis(x, jnp.zeros((2, 3), jnp.int32), out_of_bounds="nan")
