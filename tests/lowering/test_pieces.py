"""Traced functions in pieces: results, what is handed on, what is not cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern.lowering import pieces
from jaxkern.lowering.pieces import InPieces, cut
from tests.lowering.test_sharded_call import mesh_of

pytestmark = pytest.mark.smoke
LAYERS, X = 6, jnp.arange(8.0).reshape(1, 8)
WEIGHTS = [jnp.eye(8) / (i + 1) for i in range(LAYERS)]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """So that few layers are cut."""
    monkeypatch.setattr(pieces, "EQUATIONS", LAYERS)


def model(weights, x, seed):
    """Layers with a cache each, all of which are made first, as a generator's are."""
    caches = [jnp.zeros((4, 8)) for _ in weights]
    for i, w in enumerate(weights):
        caches[i] = jax.lax.dynamic_update_slice(caches[i], x, (i % 4, 0))
        x = x + jnp.tanh(caches[i].sum(0) @ w)
    return {"x": x, "caches": caches, "seed": seed, "again": x}, jax.random.key(seed)


def leaves(tree):
    keys = jax.dtypes.prng_key
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, keys) else x)
        for x in jax.tree.leaves(tree)
    ]


def compiled(f, arguments, count):
    traced = jax.jit(f).trace(*arguments)
    found = cut(traced, arguments, count)
    assert found
    order, every = found
    executables = [one.function.lower(*one.shapes).compile() for one in every]
    return InPieces(order, executables, jax.tree.structure(traced.out_info))


@pytest.mark.parametrize("count", [2, 3])
def test_pieces_give_what_the_function_gives(count):
    arguments = WEIGHTS, X, jnp.int32(3)
    run, expected = compiled(model, arguments, count), model(*arguments)
    for given in (arguments, (WEIGHTS, np.asarray(X), np.int32(3))):
        found = run(*given)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for x, y in zip(leaves(found), leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)
    assert len(run.executables) == count
    assert run.as_text().count("ENTRY") == count
    for i in range(count):
        assert f"jit_model_{i + 1}" in run.as_text()


def test_each_piece_takes_its_own_weights_and_one_array_of_the_piece_before():
    arguments = WEIGHTS, X, jnp.int32(3)
    found = cut(jax.jit(model).trace(*arguments), arguments, 3)
    assert found
    order, every = found
    assert [len(one.shapes) for one in every] == [3, 3, 4]  # x; the seed of the key
    for taken in order.takes:
        assert sum(i < LAYERS for i in taken) == LAYERS // 3
    caches = [
        [s for s in jax.tree.leaves(one.function.eval_shape(*one.shapes)) if s.ndim > 1]
        for one in every
    ]
    assert [sum(s.shape == (4, 8) for s in c) for c in caches] == [2, 2, 2]


def test_a_result_that_stands_there_twice_is_two_arrays():
    """A caller may donate one of them."""
    arguments = WEIGHTS, X, jnp.int32(3)
    found, _ = compiled(model, arguments, 2)(*arguments)
    found["x"].delete()
    np.testing.assert_allclose(found["again"], model(*arguments)[0]["x"], rtol=1e-6)


@pytest.mark.parametrize("seed", [np.int32(3), jnp.int32(3)])
def test_an_operand_that_is_a_result_is_an_array_of_its_own(seed):
    arguments = WEIGHTS, X, seed
    found, _ = compiled(model, arguments, 2)(*arguments)
    assert isinstance(found["seed"], jax.Array)
    found["seed"].delete()
    assert seed == 3


def test_constants_stay_in_the_piece_that_reads_them():
    table = np.arange(8.0, dtype=np.float32)

    def f(weights, x):
        return model(weights, x + table, jnp.int32(1))[0]["x"] * table

    arguments = WEIGHTS, X
    found = compiled(f, arguments, 2)(*arguments)
    np.testing.assert_allclose(found, f(*arguments), rtol=1e-6)


def test_weights_stay_on_their_device():
    device = jax.devices()[1]
    arguments = jax.device_put((WEIGHTS, X, jnp.int32(3)), device)
    found = compiled(model, arguments, 2)(*arguments)
    assert {d for x in jax.tree.leaves(found) for d in x.devices()} == {device}


def prints(weights, x, seed):
    jax.debug.print("{}", x)
    return model(weights, x, seed)


def gives_a_constant(weights, x, seed):
    return model(weights, x, seed), 3.0


@pytest.mark.parametrize(
    "f", [model, prints, gives_a_constant, jax.jit(model, donate_argnums=1)]
)
def test_other_functions_are_not_cut(f):
    arguments = WEIGHTS, jax.ShapeDtypeStruct(X.shape, X.dtype), jnp.int32(3)
    few = 1 if f is model else 3
    assert cut(jax.jit(f).trace(*arguments), arguments, few) is None


def test_neither_a_short_one_nor_one_over_devices_is(monkeypatch):
    rows = jax.device_put(WEIGHTS, NamedSharding(mesh_of(rows=2), P()))
    arguments = rows, X, jnp.int32(3)
    assert cut(jax.jit(model).trace(*arguments), arguments, 2) is None
    monkeypatch.setattr(pieces, "EQUATIONS", 1000)
    arguments = WEIGHTS, X, jnp.int32(3)
    assert cut(jax.jit(model).trace(*arguments), arguments, 2) is None
