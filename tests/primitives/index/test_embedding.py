"""Embedding and its gradient against NumPy loops: bounds, repeats, id dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern.primitives.index.embedding import embedding
from jaxkern.testing.checks import bf16, case, f32, i32

CASES = [
    case("smollm2", ids=i32(2, 16, high=4915), table=bf16(4915, 576)),
    case("qwen3_0_6b", ids=i32(512, high=151936), table=bf16(151936, 1024), full=True),
    case("odd", ids=i32(3, 7, high=11), table=f32(11, 5)),
    case("even", ids=i32(8, 4, low=-3, high=20), table=f32(16, 8)),
    case("clip", ids=i32(8, low=-3, high=20), table=f32(16, 8), out_of_bounds="clip"),
    case("scalar", ids=i32(high=4), table=f32(4, 3)),
    case("no_ids", ids=i32(0), table=f32(4, 3)),
]


def oracle(ids, table, out_of_bounds):
    v, d = table.shape
    y = np.zeros((ids.size, d))
    for n, i in enumerate(ids.ravel().tolist()):
        if 0 <= i < v or out_of_bounds == "clip":
            y[n] = table[min(max(i, 0), v - 1)]
    return y.reshape(*ids.shape, d)


def gradient_oracle(ids, dy, v, out_of_bounds):
    dtable = np.zeros((v, dy.shape[-1]))
    for i, row in zip(ids.ravel().tolist(), dy.reshape(ids.size, -1), strict=True):
        if 0 <= i < v or out_of_bounds == "clip":
            dtable[min(max(i, 0), v - 1)] += row
    return dtable


@pytest.mark.parametrize("out_of_bounds", ["zeros", "clip"])
def test_values_and_gradients_match_the_loop(out_of_bounds):
    rng = np.random.default_rng(0)
    ids = rng.integers(-4, 15, (6, 50)).astype(np.int32)
    table, dy = rng.standard_normal((11, 3)), rng.standard_normal((6, 50, 3))
    y, vjp = jax.vjp(
        lambda t: embedding(jnp.asarray(ids), t, out_of_bounds=out_of_bounds),
        jnp.asarray(table, jnp.float32),
    )
    expected = oracle(ids, table.astype(np.float32), out_of_bounds)
    np.testing.assert_array_equal(y, expected)
    (dtable,) = vjp(jnp.asarray(dy, jnp.float32))
    expected = gradient_oracle(ids, dy, 11, out_of_bounds)
    np.testing.assert_allclose(dtable, expected, 1e-5, 1e-5)


@pytest.mark.parametrize(
    "dtype, ids",
    [
        ("int8", [-128, -1, 0, 127]),
        ("uint8", [0, 5, 200, 255]),
        ("int16", [-32768, 0, 299, 300]),
        ("uint16", [0, 299, 300, 65535]),
        ("int32", [-(2**31), -1, 299, 2**31 - 1]),
        ("uint32", [0, 299, 300, 2**32 - 1]),
    ],
)
@pytest.mark.parametrize("out_of_bounds", ["zeros", "clip"])
def test_every_id_of_every_dtype(dtype, ids, out_of_bounds):
    ids = np.asarray(ids, dtype)
    table = 1 + np.arange(300.0)[:, None]
    y = embedding(
        jnp.asarray(ids), jnp.asarray(table, jnp.float32), out_of_bounds=out_of_bounds
    )
    np.testing.assert_array_equal(y, oracle(ids, table, out_of_bounds))


def test_large_int64_ids_do_not_wrap_into_the_table():
    with jax.enable_x64(True):
        ids = jnp.asarray([2**32 + 1, -(2**32) + 1, 1], jnp.int64)
        table = jnp.asarray([[1.0], [2.0]])
        np.testing.assert_array_equal(embedding(ids, table)[:, 0], [0, 0, 2])
        clipped = embedding(ids, table, out_of_bounds="clip")[:, 0]
        np.testing.assert_array_equal(clipped, [2, 1, 2])


def test_a_frequent_id_loses_nothing_in_bfloat16():
    ids, table = jnp.zeros(4096, jnp.int32), jnp.ones((2, 1), jnp.bfloat16)
    grad = jax.grad(lambda t: embedding(ids, t).astype(jnp.float32).sum())(table)
    np.testing.assert_array_equal(np.float32(grad), [[4096], [0]])


def test_the_gradient_is_the_same_in_every_run():
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, 4, 5000), jnp.int32)
    dy = jnp.asarray(rng.standard_normal((5000, 8)), jnp.float32)
    f = jax.jit(lambda t: jax.vjp(lambda t: embedding(ids, t), t)[1](dy)[0])
    first = f(jnp.ones((4, 8)))
    for _ in range(5):
        np.testing.assert_array_equal(f(jnp.ones((4, 8))), first)


def test_an_unread_nan_is_not_seen():
    table = jnp.asarray([[jnp.nan], [1.0]])
    np.testing.assert_array_equal(embedding(jnp.asarray([1, -1]), table), [[1], [0]])


def test_an_empty_table_gives_zeros():
    y, vjp = jax.vjp(lambda t: embedding(jnp.asarray([0, 3]), t), jnp.ones((0, 2)))
    np.testing.assert_array_equal(y, jnp.zeros((2, 2)))
    assert vjp(jnp.ones((2, 2)))[0].shape == (0, 2)


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="embedding: `out_of_bounds` must be one of"):
        embedding(jnp.zeros(1, jnp.int32), jnp.ones((2, 2)), out_of_bounds="fill")
    with pytest.raises(
        TypeError, match="embedding: `ids` must have a dtype of kind Int"
    ):
        embedding(jnp.zeros(1), jnp.ones((2, 2)))
