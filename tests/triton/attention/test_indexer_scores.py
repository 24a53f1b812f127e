"""The kernel of index scores, in the interpreter against the reference; refusals."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import explain, indexer_scores
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.attention.over_sequences import over_sequences
from jaxkern.gpu.device import compiling_for
from jaxkern.primitives.attention.indexer_scores import indexer_scores_reference
from jaxkern.triton.attention import indexer_scores as kernels
from tests.triton.interpreted import (
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

CASES = {  # b, t, n, h, s, causal, block size, pool
    "keys": (2, 2, 5, 20, 70, True, 1, "max"),
    "blocks": (2, 1, 70, 16, 90, False, 8, "max"),
    "means": (1, 3, 4, 16, 100, True, 16, "mean"),
}


@starts_it
def test_interpreted_kernels():
    check_in_its_own_process(__file__, len(CASES))


@alone
@pytest.mark.parametrize("name", CASES)
def test_scores_of_keys_and_blocks(name):
    b, t, n, h, s, causal, block_size, pool = CASES[name]
    rng = np.random.default_rng([b, t, n])
    query, key, weights = (
        jnp.asarray(rng.standard_normal(x), jnp.float32)
        for x in ((b, t, n, h), (b, s, h), (b, t, n))
    )
    lengths = jnp.asarray([s - 20, s + 5][:b], jnp.int32)
    offsets = jnp.asarray([s - 25, s // 2][:b], jnp.int32)
    key = key.at[0, s - 15].set(jnp.nan)  # behind the first length
    operands = query, key, weights, lengths, offsets
    options: Any = dict(causal=causal, block_size=block_size, pool=pool)
    with interpreted():
        found = kernels.indexer_scores(*operands, **options)
    expected = jax.jit(lambda *x: indexer_scores_reference(*x, **options))(*operands)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert (expected == -jnp.inf).any() and not np.isnan(expected).any()


needs_triton = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)


def explained(n=64, h=128, s=9000, b=2, t=1, dtype="bfloat16", key=None, **options):
    shapes = (b, t, n, h), (b, s, h), (b, t, n)
    dtypes = dtype, key or dtype, "float32"
    operands = (jax.ShapeDtypeStruct(*x) for x in zip(shapes, dtypes, strict=True))
    f = lambda *x: indexer_scores(*x, **options)  # noqa: E731
    return explain(f, *operands, platform="cuda")


@starts_it
@needs_triton
@pytest.mark.parametrize(
    "given, reason",
    [
        (dict(h=300), "300 dims of bfloat16, more than 256"),
        (dict(h=200, dtype="float32"), "200 dims of float32, more than 128"),
        (dict(key="float32"), "`query` is bfloat16, `key` float32"),
        (dict(s=0), "`key` is empty"),
        (dict(block_size=48), "blocks of 48 keys, no power of two up to 128"),
        (dict(block_size=256), "blocks of 256 keys, no power of two up to 128"),
    ],
)
def test_refusals_in_words(given, reason):
    text = str(explained(**given))
    assert reason in text and "indexer_scores_kernel" not in text


@starts_it
def test_a_vmap_makes_more_sequences():
    """Of one result, with keys of each and with keys that all share."""

    def launch(query, key, bias):
        return (query @ key.swapaxes(-1, -2),)

    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.integers(-9, 9, (3, 2, 4, 5))) for _ in range(2))
    run = functools.partial(over_sequences, launch, (1,), ())
    for axes, keys in ((0, key), (None, key[0])):
        [found] = jax.vmap(run, (0, axes, None))(query, keys, None)
        np.testing.assert_array_equal(found, query @ keys.swapaxes(-1, -2))


@starts_it
@needs_triton
@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize(
    "given",
    [
        dict(block_size=64, pool="mean"),
        dict(b=64),
        dict(n=200, h=256, t=4, causal=True),
        dict(n=8, h=64, dtype="float32", block_size=128),
        dict(b=64, dtype="float32"),
    ],
    ids=str,
)
def test_tiles_fit_and_do_not_spill(given, capability):
    with compiling_for(capability):
        [row] = explained(**given).rows
        [launch] = row.launches
        assert launch.shared_bytes <= bridge.max_shared_bytes(), launch.describe()
        assert launch.stack_bytes == 0, launch.describe()
