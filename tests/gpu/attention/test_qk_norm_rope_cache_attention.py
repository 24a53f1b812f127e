"""The kernel of a decode step's attention on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, explain, qk_norm_rope_cache_attention
from jaxkern.lowering.chained import chained
from tests.gpu.truth import EPSILON, on_a_gpu, poison, relative_errors
from tests.triton.attention.test_qk_norm_rope_cache_attention import (
    operands,
    with_record,
)

pytestmark = on_a_gpu
SHAPES = [  # s, k, g, h, hv
    (641, 8, 4, 64, 64),
    (1000, 2, 8, 128, 128),
    (500, 2, 4, 256, 256),
    (90, 2, 16, 72, 80),
    (300, 3, 3, 80, 37),
    (2000, 2, 2, 64, 64),
    (640, 1, 8, 256, 256),
    (1000, 2, 2, 64, 128),
]
LONG_SHAPES = [
    (8065, 8, 4, 64, 64),
    (40001, 8, 4, 64, 64),
    (8065, 8, 4, 128, 128),
    (9001, 8, 3, 80, 37),
    (9001, 8, 2, 72, 96),
]
OPTIONS = {
    "llama": dict(eps=None, pairing="interleaved"),
    "norms": dict(eps=1e-6, offset=1.0, weights=True, sinks=True),
    "values": dict(eps=1e-6, value_eps=1e-6, weights=True, window=512, scale=1.0),
    "window": dict(eps=1e-6, weights=True, window=70, scale=0.1),
    "gates": dict(eps=1e-6, weights=True, gated=True),
    "softcap": dict(eps=None, softcap=2.0),
}


def given(shape, dtype, b=3, weights=False, sinks=False, **options):
    s, k, g, h, hv = shape
    arrays = operands(b, s, k, g, h, hv, weights=weights, dtype=dtype)
    sinks = jnp.linspace(-1, 3, k * g) if sinks else None
    if options.get("gated"):
        gates = np.random.default_rng(h).standard_normal((b, 1, k * g, hv))
        both = jnp.concatenate([arrays[0], jnp.asarray(gates, dtype)], axis=-1)
        arrays = both, *arrays[1:]
    positions = jnp.array([s - 1, 0, s // 2, s][:b])
    lengths = jnp.array([1, 1, 0, 1][:b])
    return (*arrays, positions, lengths, sinks), with_record(options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_options(shape, options, dtype):
    compare(*given(shape, dtype, **options), dtype, launches=1)


@pytest.mark.parametrize("options", ["llama", "norms", "softcap"])
@pytest.mark.parametrize("shape", LONG_SHAPES, ids=str)
def test_a_long_cache_of_one_sequence(shape, options):
    dtype = "bfloat16"
    arrays = given(shape, dtype, b=1, **OPTIONS[options])
    compare(*arrays, dtype, launches=2)


def compare(arrays, options, dtype, launches):
    f = functools.partial(qk_norm_rope_cache_attention, **options)
    [row] = explain(f, *arrays).rows
    assert len(row.launches) == launches
    poison(*jax.tree.leaves(arrays))
    with backend("triton", strict=True):
        found = jax.jit(f)(*arrays)
    wide = jax.tree.map(
        lambda x: x.astype(jnp.float32) if x.dtype == dtype else x, arrays
    )
    with backend("xla"), jax.default_matmul_precision("highest"):
        truth = jax.jit(f)(*wide)
        plain = jax.jit(f)(*arrays)
    errors = relative_errors(found, truth, 1e-2)
    bounds = relative_errors(plain, truth, 1e-2)
    for error, its in zip(errors, bounds, strict=True):
        assert error < max(2 * EPSILON[dtype], 1.5 * its), (errors, bounds)
    for new, old in zip(found[1:], plain[1:], strict=True):
        assert (np.asarray(new != old).mean(axis=(0, 2, 3)) > 0).sum() <= 3


@pytest.mark.parametrize("in_chains", [False, True])
@pytest.mark.parametrize("s", [120, 641, 2000, 2100])
def test_many_steps_in_place(s, in_chains):
    """Keys that the step before has written are read by the next; the bits are those of
    launches one by one."""
    arrays, options = given((s, 2, 4, 64, 64), "bfloat16", b=2, eps=None)
    *new, key_cache, value_cache, _, _, _ = arrays
    caches = (key_cache, value_cache), (value_cache, key_cache)
    start = jnp.array([s - 40, 3])

    def step(new, caches, positions):
        query, *rest = new
        after = []
        for keys, values in caches:
            query, *both = qk_norm_rope_cache_attention(
                query, *rest, keys, values, positions, **options
            )
            after.append(tuple(both))
        return query, tuple(after)

    def steps(step, caches, before=None):
        """Each with the query that the step before it made, here or in `before`."""
        run = jax.jit(step, donate_argnums=1)
        caches, query = jax.tree.map(jnp.copy, caches), new[0]
        found = []
        for i in range(30):
            query = before[i - 1] if before and i else query
            query, caches = run((query, *new[1:]), caches, start + i)
            found.append(query)
        return found, caches

    with backend("triton"):
        one, after = steps(step, caches)
        other, too = steps(chained(step) if in_chains else step, caches)
    for a, b in zip(
        jax.tree.leaves((one, after)), jax.tree.leaves((other, too)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    with backend("xla"):  # a rounding of one step is 0.28 some steps later
        plain, _ = steps(step, caches, one)
    for a, b in zip(one, plain, strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), atol=0.06, rtol=0.06)


def test_under_a_scan_over_layers_the_rest_of_the_cache_is_carried_over():
    """XLA gives the slices of stacked caches two buffers each."""
    arrays, options = given((200, 2, 4, 64, 64), "bfloat16", b=2, eps=None)
    *new, keys, values, positions, lengths, _ = arrays
    stacked = jnp.stack([keys, values, keys]), jnp.stack([values, keys, keys])

    def layers(query, stacked):
        def layer(query, caches):
            out, *both = qk_norm_rope_cache_attention(
                query, *new[1:], *caches, positions, lengths, **options
            )
            return out, tuple(both)

        return jax.lax.scan(layer, query, stacked)

    with backend("triton", strict=True):
        found = jax.jit(layers)(new[0], stacked)
    with backend("xla"):
        expected = jax.jit(layers)(new[0], stacked)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), atol=0.03, rtol=0.03)
