"""The kernel of sparse attention on a GPU against the reference in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, indexer_scores, select_keys, sparse_attention
from tests.gpu.attention.test_decode_attention import check, draw
from tests.gpu.truth import on_a_gpu, relative_error

pytestmark = on_a_gpu


def lists_of(b, t, lists, selected, blocks):
    """None names a block twice; some name what does not exist."""
    rng = np.random.default_rng([b, t, lists, selected])
    every = np.broadcast_to(np.arange(-1, blocks + 1), (b, t, lists, blocks + 2))
    return jnp.asarray(rng.permuted(every, axis=-1)[..., :selected], jnp.int32)


def ours(**options):
    options = dict(return_lse=True, scale=0.07, unique_indices=True) | options
    return functools.partial(sparse_attention, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("n, t, s", [(128, 1, 4096), (16, 3, 2500), (5, 2, 2100)])
@pytest.mark.parametrize("h, hv", [(576, 512), (512, 512), (80, 64), (576, 500)])
def test_tokens_of_a_latent_cache(h, hv, n, t, s, dtype):
    latent, lists = draw((2, s, 1, h), dtype, 1), lists_of(2, t, 1, 2048, s)
    f = lambda q, x: ours(value_dim=hv)(q, x, None, lists)  # noqa: E731
    check(f, draw((2, t, n, h), dtype), latent)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("size, selected", [(1, 100), (16, 9), (48, 7), (64, 16)])
@pytest.mark.parametrize("t, k, g, lists", [(1, 4, 16, 4), (3, 2, 3, 1), (8, 1, 1, 1)])
@pytest.mark.parametrize("h, hv", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_blocks(h, hv, t, k, g, lists, size, selected, dtype):
    s = 5000
    indices = lists_of(2, t, lists, selected, -(-s // size))
    shapes = (2, t, k * g, h), (2, s, k, h), (2, s, k, hv)
    lengths, offsets = jnp.array([s, 1000]), jnp.array([s - t, 1000 - t])
    f = lambda *x: ours(  # noqa: E731
        block_size=size, kv_lengths=lengths, q_offset=offsets, causal=True
    )(*x, indices)
    check(f, *(draw(x, dtype, i) for i, x in enumerate(shapes)))


def test_a_row_that_names_nothing_and_one_that_names_things_twice():
    q, latent = draw((3, 1, 16, 576), "bfloat16"), draw((3, 900, 1, 576), "bfloat16", 1)
    twice = jnp.arange(300).repeat(3)[None, None, None].repeat(3, 0)
    lists = twice.at[1].set(-1)
    options = dict(value_dim=512, unique_indices=False)
    f = lambda q, x: ours(**options)(q, x, None, lists)  # noqa: E731
    out, lse = check(f, q, latent)
    assert not out[1].any() and (lse[1] == -jnp.inf).all()


def test_nan_behind_the_lengths_and_in_what_is_not_selected_has_no_influence():
    q, latent = (
        draw((2, 1, 32, 576), "bfloat16"),
        draw((2, 3000, 1, 576), "bfloat16", 1),
    )
    lengths, lists = jnp.array([2000, 0]), lists_of(2, 1, 1, 512, 3000)
    named = jnp.zeros((2, 3001), bool)
    named = named.at[jnp.arange(2)[:, None], lists[:, 0, 0]].set(True)[:, :3000]
    read = named & (jnp.arange(3000) < lengths[:, None])
    dirty = jnp.where(read[:, :, None, None], latent, jnp.nan)
    with backend("triton", strict=True):
        f = jax.jit(
            lambda x: ours(value_dim=512)(q, x, None, lists, kv_lengths=lengths)
        )
        clean, found = f(latent), f(dirty)
    jax.tree.map(np.testing.assert_array_equal, found, clean)
    assert np.isfinite(np.asarray(found[0], np.float32)).all()


def test_vmap_of_sequences():
    q = draw((2, 3, 1, 32, 576), "bfloat16")
    latent = draw((2, 3, 500, 1, 576), "bfloat16", 1)
    lists = lists_of(6, 1, 1, 200, 500)
    f = lambda q, x, i: ours(value_dim=512)(q, x, None, i)  # noqa: E731
    with backend("triton", strict=True):
        found = jax.jit(jax.vmap(f))(q, latent, lists.reshape(2, 3, 1, 1, 200))
        flat = f(q.reshape(6, 1, 32, 576), latent.reshape(6, 500, 1, 576), lists)
    for y, e in zip(found, flat, strict=True):
        assert relative_error(y.reshape(e.shape), e) < 1e-6


def test_a_step_of_decoding():
    """The indexer, the choice and the attention in one jit."""
    q, latent = (
        draw((4, 1, 64, 576), "bfloat16"),
        draw((4, 6000, 1, 576), "bfloat16", 1),
    )
    index_q, index_k = (
        draw((4, 1, 64, 128), "bfloat16", 2),
        draw((4, 6000, 128), seed=3),
    )
    weights, lengths = draw((4, 1, 64), seed=4), jnp.array([6000, 2049, 2048, 7])
    scores = indexer_scores(index_q, index_k, weights, kv_lengths=lengths)
    chosen = select_keys(scores, 2048)
    f = lambda q, x: ours(value_dim=512)(q, x, None, chosen, kv_lengths=lengths)  # noqa: E731
    check(f, q, latent)
