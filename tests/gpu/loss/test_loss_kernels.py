"""Kernels of the losses on a GPU: long and odd rows, every option, wrong labels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, cross_entropy, linear_cross_entropy
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu
EVERY = dict(label_smoothing=0.1, z_loss=0.01, softcap=5.0, ignore_index=2)


def draw(*shape, dtype="float32", scale=3.0):
    values = np.random.default_rng(list(shape)).standard_normal(shape)
    return jnp.asarray(scale * values, dtype)


def draw_labels(rows, v):
    labels = np.random.default_rng(rows).integers(0, v, rows)
    return jnp.asarray(labels, jnp.int32).at[:3].set(jnp.array([2, -100, v - 1]))


@pytest.mark.parametrize(
    "v, dtype",
    [
        (3, "float32"),
        (13, "bfloat16"),
        (1000, "float16"),
        (2049, "float32"),
        (8192, "bfloat16"),
        (50257, "bfloat16"),
        (50257, "float32"),
        (128256, "bfloat16"),
    ],
)
@pytest.mark.parametrize("options", [{}, EVERY], ids=["plain", "every_option"])
def test_cross_entropy_of_long_and_odd_rows(v, dtype, options):
    rows = 300 if v < 10000 else 37
    labels = draw_labels(rows, v)
    if options:  # -100 is a wrong label there
        labels = labels.at[1].set(0)

    def f(x):
        return cross_entropy(x, labels, return_lse=True, **options)

    check_against_float64(f, draw(rows, v, dtype=dtype), slack=3.0)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_cross_entropy_of_special_values(softcap):
    inf, nan = jnp.inf, jnp.nan
    x = jnp.array(
        [
            [nan, 1.0, 2.0],
            [inf, 1.0, 2.0],
            [-3e38, -3e38, -3e38],
            [1e30, 0.0, 0.0],
            [-inf, 3.0, -inf],
            [-inf, -inf, -inf],
            [1.0, 2.0, 3.0],
            [1.0, 2.0, 3.0],
        ]
    )
    labels = jnp.array([0, 1, 2, 1, 0, 1, 3, -1], jnp.int8)

    def run(x):
        options = dict(softcap=softcap, z_loss=0.1, return_lse=True)
        y, pull = jax.vjp(lambda x: cross_entropy(x, labels, **options), x)
        return y, pull((jnp.ones(8), jnp.full(8, 0.5)))

    with backend("triton", strict=True):
        found = jax.jit(run)(x)
    with backend("xla"):
        expected = jax.jit(run)(x)
    for y, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(y, e, rtol=1e-5, atol=1e-6)


def test_cross_entropy_under_transformations():
    x, labels = draw(4, 6, 50), draw_labels(24, 50).reshape(4, 6)

    def every(x):
        each = jax.vmap(cross_entropy)(x, labels)
        slopes = jax.vmap(jax.grad(lambda x, y: cross_entropy(x, y).sum()))(x, labels)
        shared = jax.vmap(lambda x: cross_entropy(x, labels[0]))(x)
        jvp = jax.jvp(lambda x: cross_entropy(x, labels), (x,), (x[::-1],))
        return each, slopes, shared, jvp

    with backend("triton", strict=True):
        found = jax.jit(every)(x)
    with backend("xla"):
        expected = jax.jit(every)(x)
    for y, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(y, e, rtol=2e-5, atol=2e-5)


def test_no_tokens():
    with backend("triton", strict=True):
        assert cross_entropy(jnp.zeros((0, 7)), jnp.zeros(0, int)).shape == (0,)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("options", [{}, EVERY], ids=["plain", "every_option"])
@pytest.mark.parametrize("v, block_size", [(1000, 256), (5003, None)])
def test_linear_cross_entropy_by_blocks(v, block_size, options, dtype):
    labels = draw_labels(60, v).at[1].set(0)
    operands = draw(60, 128, dtype=dtype, scale=1), draw(v, 128, dtype=dtype, scale=0.2)

    def f(x, weight):
        return linear_cross_entropy(
            x, weight, labels, block_size=block_size, return_lse=True, **options
        )

    with jax.default_matmul_precision("highest"):
        check_against_float64(f, *operands, slack=5.0)


def test_linear_cross_entropy_of_a_frozen_weight():
    x, weight, labels = draw(60, 128), draw(1000, 128), draw_labels(60, 1000)

    def slope(x):
        return jax.grad(lambda x: linear_cross_entropy(x, weight, labels).sum())(x)

    with jax.default_matmul_precision("highest"), backend("triton", strict=True):
        found = jax.jit(slope)(x)
    with jax.default_matmul_precision("highest"), backend("xla"):
        np.testing.assert_allclose(found, jax.jit(slope)(x), rtol=1e-4, atol=1e-5)
