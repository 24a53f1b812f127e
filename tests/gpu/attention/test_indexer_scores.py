"""The kernel of index scores on a GPU against the reference in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, indexer_scores
from jaxkern.testing.checks import in_float64
from tests.gpu.attention.test_decode_attention import draw
from tests.gpu.truth import on_a_gpu, poison, relative_error

pytestmark = on_a_gpu


def operands(b, t, n, h, s, dtype):
    return draw((b, t, n, h), dtype), draw((b, s, h), dtype, 1), draw((b, t, n), seed=2)


def check(f, *given):
    """Products of 16 bits are exact in float32, so only their sums are rounded."""
    poison(*given[:2])
    with backend("triton", strict=True):
        found = jax.jit(f)(*given)
    with jax.enable_x64(True), backend("xla"):
        truth = jax.jit(f)(*map(in_float64, given))
    assert relative_error(found, truth) < 4e-6
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("t, s", [(1, 5000), (3, 777), (1, 1), (200, 300)])
@pytest.mark.parametrize("n, h", [(64, 128), (5, 80), (100, 64), (1, 16)])
def test_heads_and_keys(n, h, t, s, dtype):
    check(indexer_scores, *operands(2, t, n, h, s, dtype))


@pytest.mark.parametrize("pool", ["max", "mean"])
@pytest.mark.parametrize("block_size", [1, 2, 64, 128])
@pytest.mark.parametrize("t", [1, 4])
def test_blocks_of_what_is_visible(t, block_size, pool):
    query, key, weights = operands(4, t, 32, 128, 1000, "bfloat16")
    lengths, offsets = jnp.array([1000, 0, 130, 999]), jnp.array([996, 0, -2, 500])
    behind = (jnp.arange(1000) >= lengths[:, None])[:, :, None]
    f = functools.partial(
        indexer_scores,
        kv_lengths=lengths,
        q_offset=offsets,
        causal=True,
        block_size=block_size,
        pool=pool,
    )
    clean = check(f, query, key, weights)
    assert (clean[1] == -jnp.inf).all()
    with backend("triton", strict=True):
        found = jax.jit(f)(query, jnp.where(behind, jnp.nan, key), weights)
    np.testing.assert_array_equal(found, clean)


def test_vmap_of_sequences():
    given = operands(6, 2, 64, 128, 500, "bfloat16")
    stacked = [x.reshape(2, 3, *x.shape[1:]) for x in given]
    with backend("triton", strict=True):
        found = jax.jit(jax.vmap(indexer_scores))(*stacked)
        flat = jax.jit(indexer_scores)(*given)
    np.testing.assert_array_equal(found.reshape(flat.shape), flat)
