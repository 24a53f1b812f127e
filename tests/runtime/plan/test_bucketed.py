"""Bucketed calls are exact in the live extent, or say that they cannot be."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.runtime import bucketed


def rows(n, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(n, 8)), jnp.float32)


@pytest.mark.smoke
def test_rowwise_functions_are_exact_at_every_extent():
    f = bucketed(jaxkern.rms_norm, 0, buckets=(8, 4))
    assert f.buckets == (4, 8) and f.compiled_buckets == ()
    for n in (3, 4, 2, 1):
        np.testing.assert_array_equal(f(rows(n)), jaxkern.rms_norm(rows(n)))
    assert f.compiled_buckets == (4,)
    for n in (5, 8):
        np.testing.assert_array_equal(f(rows(n)), jaxkern.rms_norm(rows(n)))
    assert f.compiled_buckets == (4, 8) and len(f.plans) == 2


def test_what_reads_the_padding_is_refused():
    """Also when the first call filled the bucket and read none."""
    f = bucketed(lambda x: x - x.sum(0), 0, buckets=(4,))
    f(rows(4))
    with pytest.raises(ValueError, match="depend on the padding"):
        f(rows(3))
    with pytest.raises(ValueError, match="depend on the padding"):
        f(rows(3))


@pytest.mark.smoke
def test_attention_with_a_live_length():
    """Keys behind the length are masked, so a longer bucket changes nothing."""

    def attend(q, kv, *, length):
        lengths = jnp.broadcast_to(length, q.shape[:1])
        return jaxkern.attention(q, kv, kv, kv_lengths=lengths)

    f = bucketed(attend, (1, 1), (1,), buckets=(8,), length="length")
    g = bucketed(attend, (None, 1), None, buckets=(8,), length="length")
    q = jnp.asarray(np.random.default_rng(1).normal(size=(1, 5, 2, 4)), jnp.float32)
    kv = jnp.asarray(np.random.default_rng(2).normal(size=(1, 5, 2, 4)), jnp.float32)
    expected = jaxkern.attention(q, kv, kv)
    np.testing.assert_allclose(g(q, kv), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(TypeError, match="returns one result"):
        f(q, kv)  # one result, no tuple


def test_trees_integers_and_several_results():
    def f(batch, scale):
        return batch["ids"] + 1, batch["x"] * scale

    g = bucketed(f, (0, None), (0, 0), buckets=(4,))
    batch = {"ids": jnp.arange(3), "x": rows(3)}
    ids, x = g(batch, 2.0)
    np.testing.assert_array_equal(ids, jnp.arange(1, 4))
    np.testing.assert_array_equal(x, rows(3) * 2)


def test_wrong_calls():
    f = bucketed(lambda x: x[:1], 0, buckets=(4,))
    with pytest.raises(TypeError, match=r"axis 0 must have the size 4"):
        f(rows(3))
    with pytest.raises(ValueError, match="extent 5 is above the largest bucket, 4"):
        f(rows(5))
    with pytest.raises(TypeError, match=r"must agree in their axis, got \[2, 3\]"):
        bucketed(jnp.add, 0, buckets=(4,))(rows(2), rows(3))
    with pytest.raises(ValueError, match="at least 1"):
        bucketed(jnp.sin, 0, buckets=())
    with pytest.raises(ValueError, match="needs an `out_axis`"):
        bucketed(jnp.add, (0, None))


@pytest.mark.parametrize("axis", [5, 1, -2])
def test_an_axis_that_an_array_does_not_have_is_named(axis):
    """Tests of extents that differ gave axes that are there."""
    f = bucketed(lambda x: x, axis=axis, buckets=(4,))
    with pytest.raises(ValueError, match=rf"`axis` must name .* got {axis} .*\(3,\)"):
        f(jnp.ones(3))
