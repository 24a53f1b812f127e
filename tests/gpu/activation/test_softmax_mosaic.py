"""Rows that clusters of multiprocessors hold: values, gradients, transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, cross_entropy, explain, softmax
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu
# one multiprocessor, two, four; lines of 256, 128 and 64; ends of different length
LENGTHS = [32768, 50304, 65600, 128256, 131072, 151936, 201088, 262144]
EVERY = [
    (rows, d, dtype)
    for dtype in ("bfloat16", "float16", "float32")
    for rows, d in [(1, 131072), *((145, d) for d in LENGTHS)]
    # whose ends are no lines, and which four multiprocessors do not hold
    if dtype != "float32" or d not in (65600, 262144)
]


def draw(*shape, dtype="bfloat16", scale=3.0):
    values = np.random.default_rng(list(shape)).standard_normal(shape)
    return jnp.asarray(scale * values, dtype)


def runs(f, *args):
    return "mosaic_gpu: pallas." in str(explain(f, *args))


@pytest.mark.parametrize("rows, d, dtype", EVERY)
def test_softmax(rows, d, dtype):
    x = draw(rows, d, dtype=dtype)
    with backend("mosaic_gpu"):
        assert runs(softmax, x)
    f = functools.partial(softmax, scale=-0.7)
    check_against_float64(f, x, kernels="mosaic_gpu", strict=False)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows, d, dtype", [e for e in EVERY if e[2] != "float16"])
def test_loss_and_gradient(rows, d, reduction, dtype):
    x = draw(rows, d, dtype=dtype)
    labels = np.random.default_rng(d).integers(0, d, rows).astype(np.int32)
    labels[: rows // 3] = -100

    def loss(x):
        return cross_entropy(x, jnp.asarray(labels), reduction=reduction, z_loss=1e-3)

    with backend("mosaic_gpu"):
        assert runs(jax.grad(loss), x)
    check_against_float64(loss, x, kernels="mosaic_gpu", strict=False)


def test_special_values():
    x = draw(8, 131072, dtype="float32")
    x = x.at[0].set(-jnp.inf).at[1, 3].set(jnp.inf).at[2, -1].set(jnp.nan)
    labels = jnp.array([0, 1, 2, -100, 131072, -1, 131071, 5])

    def loss_of(x, rows):
        options = dict(reduction="sum", z_loss=0.1)
        loss = functools.partial(cross_entropy, labels=labels[rows], **options)
        return jax.value_and_grad(loss)(x[rows])

    def results(x):
        y, pull = jax.vjp(softmax, x)
        return y, pull(jnp.ones_like(x)), [loss_of(x, np.array([i])) for i in range(8)]

    with backend("mosaic_gpu"):
        found = jax.jit(results)(x)
    with backend("xla"):
        expected = jax.jit(results)(x)
    for y, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(y, e, rtol=1e-4, atol=1e-6)


def test_transformations_and_the_same_bits():
    x = draw(3, 4, 131072, dtype="float32")
    labels = jnp.arange(12).reshape(3, 4)

    def loss(x, labels):
        return cross_entropy(x, labels, reduction="mean")

    def every(x):
        each = jax.vmap(jax.value_and_grad(loss))(x, labels)
        scanned = jax.lax.scan(
            lambda _, a: (None, jax.value_and_grad(jax.checkpoint(loss))(*a)),
            None,
            (x, labels),
        )[1]
        tangent = jax.jvp(lambda x: loss(x, labels), (x,), (x[::-1],))
        scaled = jax.grad(lambda x: 3 * loss(x, labels))(x)
        second = jax.jvp(jax.grad(lambda x: loss(x, labels)), (x,), (x[::-1],))
        return each, scanned, tangent, scaled, second, jax.vmap(softmax, 1, 2)(x)

    with backend("mosaic_gpu"):
        f = jax.jit(every).lower(x).compile()
        found, again = f(x), f(x)
    with backend("xla"):
        expected = jax.jit(every)(x)
    pairs = zip(*map(jax.tree.leaves, (found, again, expected)), strict=True)
    for y, same, e in pairs:
        np.testing.assert_array_equal(y, same)
        np.testing.assert_allclose(y, e, rtol=1e-4, atol=1e-6)
