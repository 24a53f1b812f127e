"""Kernels of cross_entropy on a GPU: long and odd rows, every option, wrong labels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, cross_entropy
from tests.gpu.loss.labelled import EVERY, draw, draw_labels
from tests.gpu.truth import check_against_float64, on_a_gpu

pytestmark = on_a_gpu


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
