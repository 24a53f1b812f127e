"""The gradient of an embedding on a GPU: runs of any length, the same in every run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, explain
from jaxkern.primitives.index.embedding import embedding
from jaxkern.triton.index import embedding as kernel
from tests.gpu.truth import EPSILON, on_a_gpu, poison

pytestmark = on_a_gpu


def gradient(ids, table, dy, **options):
    return jax.vjp(lambda t: embedding(ids, t, **options), table)[1](dy)[0]


@pytest.mark.parametrize("out_of_bounds", ["zeros", "clip"])
@pytest.mark.parametrize(
    "n, v, d, dtype",
    [
        (1, 5, 13, "float32"),
        (127, 300, 1030, "bfloat16"),
        (4097, 50, 576, "bfloat16"),
        (3000, 2, 4096, "float16"),
        (5000, 1, 1, "float32"),
    ],
)
def test_gradient_of_an_embedding(n, v, d, dtype, out_of_bounds, monkeypatch):
    monkeypatch.setattr(kernel, "LEAST", 0)
    rng = np.random.default_rng(n)
    ids = jnp.asarray(rng.integers(-2, v + 2, n), jnp.int32)
    table = jnp.ones((v, d), dtype)
    dy = jnp.asarray(rng.standard_normal((n, d)), dtype)

    def run(table, dy):
        return gradient(ids, table, dy, out_of_bounds=out_of_bounds)

    rows = explain(run, table, dy).rows
    assert rows[-1].op == "embedding_bwd" and rows[-1].runs.startswith("triton")
    poison(table, dy)
    found = jax.jit(run)(table, dy)
    np.testing.assert_array_equal(found, jax.jit(run)(table, dy))
    assert found.dtype == table.dtype
    with jax.enable_x64(True), backend("xla"):
        truth = jax.jit(run)(*(jnp.asarray(x, jnp.float64) for x in (table, dy)))
        truth = np.asarray(truth)
    error = np.linalg.norm(np.asarray(found, np.float64) - truth)
    assert error <= EPSILON[dtype] * max(np.linalg.norm(truth), 1e-3)


def test_a_large_table_gets_the_kernel():
    table = jnp.ones((32768, 1024), jnp.bfloat16)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 32768, (4, 2048)))
    dy = jnp.ones((4, 2048, 1024), jnp.bfloat16)
    found = jax.jit(gradient)(ids, table, dy)
    counts = np.bincount(np.asarray(ids).ravel(), minlength=32768)
    np.testing.assert_array_equal(np.float32(found[:, 7]), counts)
