"""qk_norm_rope_cache_attention: the two calls that it stands for, and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import (
    NormRope,
    attention,
    qk_norm_rope_cache,
    qk_norm_rope_cache_attention,
)
from jaxkern.testing.checks import bf16, case, f32, i32
from tests.primitives.kv_cache.test_qk_norm_rope_cache import (
    LLAMA3,
    draw,
    float_caches,
    heads,
)

PLAIN = NormRope()
SCORES = dict(gated=False, scale=0.5, window=None, softcap=None)
CASES = {
    "qk_norm_rope_cache_attention": [
        case(
            "plain",
            **heads(2, 2, 4, 2, 8, r=3, hv=4),
            **float_caches(2, 5, 2, 8, 4),
            positions=i32(2, high=5),
            new_lengths=i32(2, high=2),
            sinks=f32(4),
            pairing="neox",
            offset=1.0,
            **SCORES | dict(window=3, softcap=2.0),
        ),
        case(
            "gated",
            **heads(1, 2, 2, 1, 4, r=2, hv=3) | {"query": f32(1, 2, 2, 7)},
            **float_caches(1, 3, 1, 4, 3),
            positions=i32(1, high=2),
            new_lengths=None,
            sinks=None,
            pairing="neox",
            **SCORES | dict(gated=True),
        ),
        case(
            "llama3_decode",
            full=True,
            **heads(3, 1, 8, 2, 64, r=32, spec=bf16) | LLAMA3,
            **float_caches(3, 40, 2, 64, 64, bf16),
            positions=i32(3, high=40),
            new_lengths=i32(3, high=2),
            pairing="interleaved",
            **SCORES,
        ),
    ],
}


def two_calls(new, caches, positions, lengths, sinks, norm_rope=PLAIN, **options):
    query, keys, values = qk_norm_rope_cache(
        *new, *caches, positions, lengths, norm_rope=norm_rope
    )
    grown = query.shape[1] if lengths is None else lengths
    y = attention(
        query,
        keys,
        values,
        sinks=sinks,
        kv_lengths=positions + grown,
        q_offset=positions,
        causal=True,
        **options,
    )
    return y, keys, values


@pytest.mark.parametrize(
    "t, positions, lengths, options",
    [
        (1, [4, 0], None, {}),
        (1, [6, 2], [0, 1], {"window": 2, "scale": 0.3}),
        (3, [2, 5], [3, 1], {"softcap": 1.5, "norm_rope": NormRope(0.1)}),
        (2, [-1, 7], None, {"window": 1, "norm_rope": NormRope(value_eps=0.2)}),
    ],
    ids=str,
)
def test_it_is_the_write_and_attention(t, positions, lengths, options):
    new, weights, tables = draw(2, t, 4, 2, 16)
    rng = np.random.default_rng(1)
    caches = [jnp.float32(rng.standard_normal((2, 7, 2, 16))) for _ in range(2)]
    sinks = jnp.array([0.5, -1.0, 2.0, 0.0])
    lengths = None if lengths is None else jnp.array(lengths)
    last = jnp.array(positions), lengths, sinks
    new = *new, weights, tables

    @jax.jit
    def both(new, caches, last):
        found = qk_norm_rope_cache_attention(*new, *caches, *last, **options)
        return found, two_calls(new, caches, *last, **options)

    found, expected = both(new, caches, last)
    for a, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-6, atol=2e-6)


def test_huge_lengths_and_positions_do_not_wrap():
    """Their sum is below 0 in int32: a query that sees nothing gives zeros."""
    new, weights, tables = draw(2, 1, 4, 2, 8)
    caches = [jnp.ones((2, 5, 2, 8)) * x for x in (0.5, -0.25)]
    f = jax.jit(functools.partial(qk_norm_rope_cache_attention, *new, weights, tables))
    most = np.full(2, 2**31 - 1, np.int32)
    for given, same in (
        ((np.array([3, 0]), most), (np.array([3, 0]), None)),
        ((most, None), (np.array([5, 5]), None)),
    ):
        found, expected = (f(*caches, *last)[0] for last in (given, same))
        assert expected.any()
        np.testing.assert_array_equal(found, expected)


def test_gates_are_those_behind_the_heads():
    """In float64, and the gradient reaches them."""
    new, weights, tables = draw(2, 2, 4, 2, 8)
    gate = jnp.sin(jnp.arange(2 * 2 * 4 * 8.0)).reshape(2, 2, 4, 8)
    both = jnp.concatenate([new[0], gate], axis=-1)
    caches = [jnp.ones((2, 5, 2, 8)) * x for x in (0.5, -0.25)]
    rest = *new[1:], weights, tables, *caches, jnp.array([1, 3])
    plain, *after = jax.jit(qk_norm_rope_cache_attention)(new[0], *rest)
    f = jax.jit(functools.partial(qk_norm_rope_cache_attention, gated=True))
    found, *too = f(both, *rest)
    share = 1 / (1 + np.exp(-np.float64(gate)))
    np.testing.assert_allclose(found, np.float64(plain) * share, rtol=2e-6, atol=1e-7)
    jax.tree.map(np.testing.assert_array_equal, after, too)
    slope = jax.grad(lambda q: f(q, *rest)[0].sum())(both)[..., 8:]
    expected = np.float64(plain) * share * (1 - share)
    np.testing.assert_allclose(slope, expected, rtol=2e-5, atol=1e-6)


def test_gradients_are_those_of_the_two_calls():
    new, weights, tables = draw(2, 2, 4, 2, 8)
    caches = [jnp.ones((2, 5, 2, 8)) * x for x in (0.5, -0.25)]
    positions = jnp.array([1, 3])

    def summed(f, *arrays):
        new, caches = (*arrays[:3], weights, tables), arrays[3:]
        return sum(jnp.sum(jnp.sin(y)) for y in f(new, caches))

    one = functools.partial(
        summed, lambda new, c: qk_norm_rope_cache_attention(*new, *c, positions)
    )
    two = functools.partial(
        summed, lambda new, c: two_calls(new, c, positions, None, None)
    )
    arrays = *new, *caches
    found, expected = (
        jax.jit(jax.grad(f, argnums=tuple(range(5))))(*arrays) for f in (one, two)
    )
    for a, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5)


def test_errors_name_the_operand():
    new, weights, tables = draw(1, 1, 4, 2, 8)
    cache = jnp.zeros((1, 4, 2, 8))
    f = functools.partial(qk_norm_rope_cache_attention, *new, weights, tables)
    with pytest.raises(ValueError, match="eps=None leaves out the norms"):
        f(cache, cache, 0, norm_rope=NormRope(eps=None))
    with pytest.raises(ValueError, match=r"`query` have 8 dims .* gates of 8 ask for"):
        f(cache, cache, 0, gated=True)
    with pytest.raises(TypeError, match=r"dim `s` is 4 in `key_cache` but 3 in `value"):
        f(cache, cache[:, :3], 0)
    with pytest.raises(ValueError, match=r"qk_norm_rope_cache_attention: .*window"):
        f(cache, cache, 0, window=0)
    with pytest.raises(ValueError, match="qk_norm_rope_cache_attention: softcap is -1"):
        f(cache, cache, 0, softcap=-1.0)
