"""merge_partials: parts of the keys merged are the whole, in values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import attention, merge_partials
from jaxkern.testing.checks import bf16, case, f32

EMPTY = -np.inf


def lse_with_empty_parts(*shape):
    """About a third of the parts have seen nothing; of row 0 none has seen anything."""

    def draw(rng):
        lse = rng.standard_normal(shape).astype(np.float32)
        lse[rng.random(shape) < 0.3] = EMPTY
        lse[0] = EMPTY
        return lse

    return draw


CASES = [
    case("plain", out=f32(4, 2, 3, 4), lse=f32(4, 2, 3)),
    case("empty_parts_bf16", out=bf16(4, 3, 6), lse=lse_with_empty_parts(4, 3)),
    case("one_part", full=True, out=f32(1, 5), lse=f32(1)),
    case("llama3_8b_decode", full=True, out=bf16(4, 32, 8, 128), lse=f32(4, 32, 8)),
]


def draw(*shape, seed=0):
    x = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize("axis", [0, 2, -1])
def test_formula(axis):
    """numpy float64, the weights relative to the largest lse."""
    out, lse = draw(3, 2, 4, 5), 30 * draw(3, 2, 4)
    parts, logs = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    top = logs.max(axis, keepdims=True)
    weight = np.exp(logs - top)
    total = weight.sum(axis, keepdims=True)
    expected = (parts * (weight / total)[..., None]).sum(axis % 3)
    merged, merged_lse = merge_partials(out, lse, axis=axis)
    np.testing.assert_allclose(merged, expected, atol=1e-6)
    np.testing.assert_allclose(
        merged_lse, (top + np.log(total)).squeeze(axis), rtol=1e-6
    )


def test_unnormalised_parts():
    """(O, m, l) of a kernel: O / l and m + ln l."""
    scores, values = draw(2, 3, 7), draw(3, 7, 4)  # [rows p s], [p s h]
    m = scores.max(-1)
    p = jnp.exp(scores - m[..., None])
    sums, total = jnp.einsum("rps,psh->rph", p, values), p.sum(-1)
    out, lse = merge_partials(sums / total[..., None], m + jnp.log(total), axis=1)
    whole = jax.nn.softmax(scores.reshape(2, -1)) @ values.reshape(-1, 4)
    np.testing.assert_allclose(out, whole, atol=1e-6)
    np.testing.assert_allclose(
        lse, jax.scipy.special.logsumexp(scores, (1, 2)), atol=1e-6
    )


@pytest.mark.parametrize("lengths", [(9, 9), (3, 0)])
def test_attention_by_key_ranges_is_the_whole(lengths):
    """Values and gradients; with short lengths some parts, or all, are empty."""
    q, k, v = draw(2, 5, 4, 8), draw(2, 9, 2, 8, seed=1), draw(2, 9, 2, 8, seed=2)
    lengths = jnp.array(lengths)

    def whole(q, k, v):
        return attention(q, k, v, kv_lengths=lengths, return_lse=True)

    def merged(q, k, v):
        parts = [
            attention(
                q,
                k[:, i : i + 3],
                v[:, i : i + 3],
                kv_lengths=lengths - i,
                return_lse=True,
            )
            for i in (0, 3, 6)
        ]
        return merge_partials(*(jnp.stack(x) for x in zip(*parts, strict=True)))

    def loss(f, *qkv):
        out, lse = f(*qkv)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse > -1e30, lse, 0) ** 2)

    for a, e in zip(merged(q, k, v), whole(q, k, v), strict=True):
        np.testing.assert_allclose(a, e, atol=1e-6)
    actual, expected = (
        jax.grad(lambda *qkv, f=f: loss(f, *qkv), (0, 1, 2))(q, k, v)
        for f in (merged, whole)
    )
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, atol=2e-6)


def test_an_empty_part_is_not_read():
    """Its out may be NaN: values and gradients to second order are those without it."""
    out = jnp.stack([draw(2, 4), jnp.full((2, 4), jnp.nan), draw(2, 4, seed=1)])
    lse = jnp.stack([draw(2), jnp.full(2, EMPTY), draw(2, seed=1)])
    kept = jnp.array([0, 2])

    def loss(out, lse):
        merged, merged_lse = merge_partials(out, lse)
        return jnp.sum(jnp.sin(merged)) + jnp.sum(merged_lse**2)

    grad = jax.grad(loss, (0, 1))

    def second(out, lse):
        return jax.jvp(grad, (out, lse), (jnp.ones_like(out), jnp.ones_like(lse)))[1]

    for f in map(jax.jit, (grad, second)):
        for a, e in zip(f(out, lse), f(out[kept], lse[kept]), strict=True):
            np.testing.assert_allclose(a[kept], e, atol=1e-6)
            assert not a[1].any()


def test_no_part_has_seen_a_key():
    out, lse = jnp.full((3, 2, 4), jnp.nan), jnp.full((3, 2), EMPTY)
    merged, merged_lse = merge_partials(out, lse)
    np.testing.assert_array_equal(merged, jnp.zeros((2, 4)))
    assert (merged_lse == EMPTY).all()
    _, vjp = jax.vjp(merge_partials, out, lse)
    for g in vjp((jnp.ones((2, 4)), jnp.ones(2))):
        np.testing.assert_array_equal(g, jnp.zeros_like(g))


def test_nan_is_not_hidden():
    out, lse = jnp.ones((2, 1, 3)), jnp.array([[0.0], [jnp.nan]])
    merged, merged_lse = merge_partials(out, lse)
    assert np.isnan(merged).all() and np.isnan(merged_lse).all()


def test_the_order_and_grouping_of_parts_does_not_matter():
    out, lse = draw(4, 3, 5), 5 * draw(4, 3)
    at_once = merge_partials(out, lse)
    first, last = merge_partials(out[:2], lse[:2]), merge_partials(out[2:], lse[2:])
    in_pairs = merge_partials(*(jnp.stack(x) for x in zip(last, first, strict=True)))
    for a, e in zip(in_pairs, at_once, strict=True):
        np.testing.assert_allclose(a, e, atol=1e-6)


def test_dtypes():
    out, lse = merge_partials(draw(2, 3, 4).astype(jnp.bfloat16), draw(2, 3))
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)


def test_errors_say_what_came():
    with pytest.raises(TypeError, match=r"merge_partials: `out` must have the dims of"):
        merge_partials(jnp.ones((2, 3, 4)), jnp.ones((2, 4)))
    with pytest.raises(TypeError, match=r"merge_partials: `out` must have the dims of"):
        merge_partials(jnp.ones((2, 3)), jnp.ones((2, 3)))
