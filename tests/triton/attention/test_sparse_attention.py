"""The kernel of sparse attention, in the interpreter against the reference; refusals,
and tiles that fit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import explain, sparse_attention
from jaxkern.gpu import triton_call as bridge
from jaxkern.gpu.device import compiling_for
from jaxkern.primitives.attention.sparse_attention import (
    SparseOperands,
    sparse_attention_reference,
)
from jaxkern.triton.attention import sparse_attention as kernels
from tests.triton.interpreted import (
    alone,
    check_in_its_own_process,
    interpreted,
    starts_it,
)

# b, t, k, g, h, dims of value or None, s, lists, selected, block size, shares, dtype
CASES = {
    "latent cache": (2, 1, 1, 5, 24, None, 150, 1, 130, 1, 2, "float16"),
    "value in a tile of its own": (1, 1, 1, 2, 20, None, 30, 1, 9, 1, 1, "float32"),
    "one list for two heads": (1, 2, 2, 2, 40, 24, 50, 1, 33, 1, 3, "float32"),
    "blocks larger than a tile": (2, 2, 2, 2, 16, 16, 150, 2, 2, 64, 2, "float32"),
    "short blocks": (2, 1, 2, 3, 16, 16, 50, 2, 8, 6, 2, "float32"),
}
LIMIT = {"float16": 2e-3, "float32": 1e-5}
VALUE_DIM = 16


@starts_it
def test_interpreted_kernels():
    check_in_its_own_process(__file__, len(CASES))


def operands_of(b, t, k, g, h, hv, s, lists, selected, block_size, dtype):
    """Lists name what does not exist, name one thing twice, and one names nothing."""
    rng = np.random.default_rng([b, t, k, g, h, s])
    blocks = -(-s // block_size)
    indices = rng.integers(-2, blocks + 2, (b, t, lists, selected)).astype(np.int32)
    indices[0, 0, 0, 0] = 2**31 - 1
    indices[-1, -1, -1] = -1
    value = None if hv is None else (b, s, k, hv)
    shapes = (b, t, k * g, h), (b, s, k, h), value
    query, key, value = (
        None if x is None else jnp.asarray(rng.standard_normal(x), dtype)
        for x in shapes
    )
    lengths = jnp.asarray([s - 3, s + 9][:b], jnp.int32)
    offsets = jnp.asarray([s - 4, s // 2][:b], jnp.int32)
    return query, key, value, jnp.asarray(indices), lengths, offsets


@alone
@pytest.mark.parametrize("name", CASES)
def test_rows_that_the_indices_name(name, monkeypatch):
    *shape, block_size, shares, dtype = CASES[name]
    operands = operands_of(*shape, block_size, dtype)
    query, key, value, _, lengths, _ = operands
    behind = (jnp.arange(key.shape[1]) >= lengths[:, None])[:, :, None, None]
    dirty = [None if x is None else jnp.where(behind, jnp.nan, x) for x in (key, value)]
    monkeypatch.setattr(kernels, "num_splits", lambda *given: shares)
    options: Any = dict(
        block_size=block_size,
        value_dim=VALUE_DIM if value is None else None,
        scale=0.3,
        causal=True,
        unique_indices=False,
    )
    with interpreted():
        found = kernels.sparse_attention_fwd(query, *dirty, *operands[3:], **options)

    @jax.jit
    def reference(*operands):
        return sparse_attention_reference(SparseOperands(*operands), **options)

    limit = LIMIT[dtype]
    for y, e in zip(found, reference(*operands), strict=True):
        np.testing.assert_allclose(y, e, rtol=limit, atol=limit)
    assert not found[0][-1, -1, -1].any() and found[1][-1, -1, -1] == -jnp.inf


needs_triton = pytest.mark.skipif(
    bridge.missing() is not None, reason="triton or jax's CUDA plugin is not installed"
)


def explained(
    b=2, t=1, k=1, g=128, h=576, hv=None, s=9000, selected=2048, size=1, **given
):
    dtype, value_dim = given.get("dtype", "bfloat16"), given.get("value_dim")
    shapes = [(b, t, k * g, h), (b, s, k, h)] + [(b, s, k, hv)] * (hv is not None)
    q, *kv = (jax.ShapeDtypeStruct(x, dtype) for x in shapes)
    lists = jax.ShapeDtypeStruct((b, t, k, selected), jnp.int32)

    def f(q, indices, key, value=None):
        return sparse_attention(
            q,
            key,
            value,
            indices,
            block_size=size,
            value_dim=value_dim,
            unique_indices=True,
        )

    return explain(f, q, lists, *kv, platform="cuda")


@starts_it
@needs_triton
@pytest.mark.parametrize(
    "given, reason",
    [
        (dict(t=9), "9 queries, more than 8"),
        (dict(h=1100), "head dims 1100 and 1100, more than 512"),
        (dict(h=768, value_dim=512), "more than 512 and 128 behind"),
        (dict(dtype="float32", value_dim=512), "in float32, more than 256"),
        (dict(selected=0), "`indices` is empty"),
        (dict(s=0), "`key` is empty"),
    ],
)
def test_refusals_in_words(given, reason):
    text = str(explained(**given))
    assert reason in text and "sparse_attention_kernel" not in text


@starts_it
@needs_triton
def test_a_vmap_of_sequences_is_one_launch():
    def f(q, k, v, indices):
        return sparse_attention(q, k, v, indices, block_size=64, unique_indices=True)

    q, k = jnp.zeros((5, 2, 1, 8, 64)), jnp.zeros((5, 2, 640, 4, 64))
    lists = jnp.zeros((5, 2, 1, 4, 1), jnp.int32)
    [row] = explain(jax.vmap(f), q, k, k, lists, platform="cuda").rows
    assert [launch.grid for launch in row.launches] == [(5 * 2 * 4,)]


LATENT = dict(value_dim=512)
BLOCKS = dict(k=4, g=16, selected=16, size=64)
SIZES = [
    LATENT,
    *(
        pytest.param(x, marks=pytest.mark.full)
        for x in (
            LATENT | dict(b=64, t=2),
            BLOCKS | dict(h=128, hv=128, b=1),
            LATENT | dict(dtype="float16", g=16),
            dict(value_dim=500),
            BLOCKS | dict(h=64, hv=64),
            BLOCKS | dict(h=192, hv=128, t=8),
            BLOCKS | dict(h=256, hv=256, b=32),
            BLOCKS | dict(h=512, hv=512, b=32),
            BLOCKS | dict(h=64, hv=64, dtype="float32"),
            BLOCKS | dict(h=256, hv=256, dtype="float32", size=8, selected=128),
            dict(k=8, g=4, h=128, hv=128),
            dict(k=1, g=200, h=128, hv=128, size=32, selected=100),
        )
    ),
]


@starts_it
@needs_triton
@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(c, marks=pytest.mark.full) for c in (80, 89))]
)
@pytest.mark.parametrize("given", SIZES, ids=str)
def test_tiles_fit_and_hardly_spill(given, capability):
    with compiling_for(capability):
        [row] = explained(**given).rows
        assert row.launches[0].name == "sparse_attention_kernel"
        for launch in row.launches:
            assert launch.shared_bytes <= bridge.max_shared_bytes(), launch.describe()
            # a thread holds 128 sums, as in latent attention
            assert launch.stack_bytes <= 256, launch.describe()
