"""check_indices: an index out of bounds raises under checkify, and only if asked."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jaxkern import check_indices, embedding, gather, scatter_add, take_along_axis

TABLE = np.arange(6, dtype=np.float32).reshape(3, 2)


def one_hot(indices):
    check_indices(indices, 3, name="one_hot")
    return jax.nn.one_hot(indices, 3)


def columns(indices, table=TABLE, **options):
    both = jnp.stack([indices, indices], axis=1)
    return take_along_axis(table, both, axis=0, **options)


CHECKED = dict(out_of_bounds="checked")
CALLS = {
    "embedding": functools.partial(embedding, table=TABLE, **CHECKED),
    "gather": lambda i: gather(TABLE, i, **CHECKED),
    "take_along_axis": functools.partial(columns, **CHECKED),
    "scatter_add": lambda i: scatter_add(TABLE, i, jnp.ones((2, 2)), **CHECKED),
    "one_hot": one_hot,
}
ROWS = TABLE[[2, 0]]
EXPECTED = {
    "scatter_add": np.add(TABLE, [[1], [0], [1]]),
    "one_hot": np.eye(3)[[2, 0]],
}


@pytest.mark.parametrize("name", CALLS)
def test_an_index_out_of_bounds_is_an_error_under_checkify(name):
    f = jax.jit(checkify.checkify(CALLS[name]))
    error, y = f(jnp.array([2, 0]))
    error.throw()
    np.testing.assert_array_equal(y, EXPECTED.get(name, ROWS))
    for wrong in (3, -1):
        error, _ = f(jnp.array([1, wrong]))
        with pytest.raises(checkify.JaxRuntimeError) as raised:
            error.throw()
        assert str(raised.value).startswith(f"{name}: index {wrong} is out of bounds")


def test_it_is_off_unless_asked_for_and_then_free():
    without = jax.make_jaxpr(lambda i: gather(TABLE, i))(jnp.array([7]))
    assert "check" not in str(without)
    assert not np.any(gather(TABLE, jnp.array([7])))


def test_concrete_indices_raise_at_once_and_traced_ones_need_checkify():
    f = CALLS["embedding"]
    with pytest.raises(checkify.JaxRuntimeError, match="embedding: index 7 is out"):
        f(jnp.array([7]))
    with pytest.raises(ValueError, match="not functionalized"):
        jax.jit(f)(jnp.array([1]))


@pytest.mark.full
def test_gradients_batches_and_narrow_indices_are_checked_too():
    def loss(table, i):
        return jnp.sum(jnp.sin(embedding(i, table, **CHECKED)))

    ids = jnp.array([[0, 2], [1, 1]], jnp.int8)
    grad = checkify.checkify(jax.vmap(jax.grad(loss), (None, 0)))
    error, dtable = jax.jit(grad)(TABLE, ids)
    error.throw()
    np.testing.assert_allclose(dtable[0, 2], np.cos(TABLE[2]), rtol=1e-6)
    error, _ = jax.jit(grad)(TABLE, ids.at[1, 0].set(5))
    assert "embedding: index 5 is out of bounds" in str(error.get())
    wide = jnp.zeros((300, 1))  # more rows than int8 counts
    error, _ = checkify.checkify(CALLS["embedding"])(ids, table=wide)
    error.throw()
    check_indices(jnp.zeros((0,), jnp.int32), 0)
