"""kimi_delta_attention: the recurrence in float64, gradients, chunks, packed rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import gated_delta_rule, kimi_delta_attention
from jaxkern.primitives.delta_rule.kimi_delta_chunks import decayed_products
from jaxkern.testing.checks import bf16, case
from tests.primitives.delta_rule.test_gated_delta_rule import shapes as shapes_of_rule


def shapes(b, t, k, g, h, hv, *given, **options):
    return shapes_of_rule(b, t, k, g, h, hv, *given, channels=(h,), **options)


CASES = [
    # odd but for hv, since each dim that can be cut costs four compilations
    case("plain", **shapes(1, 3, 1, 3, 3, 2), chunk_size=2),
    case("even", full=True, **shapes(2, 4, 2, 2, 2, 2), chunk_size=4),
    case(
        "one_token_at_a_time",
        full=True,
        **shapes(1, 3, 2, 1, 2, 2, state=False),
        chunk_size=1,
    ),
    case("no_tokens", full=True, **shapes(1, 0, 1, 3, 3, 3)),
    case("many_chunks", full=True, **shapes(1, 37, 2, 2, 8, 4), chunk_size=8),
    case("kimi_linear", full=True, **shapes(1, 130, 2, 1, 128, 128, bf16, state=False)),
]


def draw(b, t, k, g, h, hv, seed=0):
    """NumPy operands: unit keys, some channels that forget at once, and a state."""
    rng = np.random.default_rng([seed, b, t, k, g, h, hv])
    query, key = rng.standard_normal((2, b, t, k, h))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = rng.standard_normal((b, t, k * g, hv))
    decay = -rng.exponential(size=(b, t, k * g, h)) * 10 ** rng.uniform(-3, 2, h)
    beta = rng.uniform(size=(b, t, k * g))
    return query, key, value, decay, beta, rng.standard_normal((b, k * g, h, hv))


def as_jax(arrays, dtype=None):
    return [jnp.asarray(x, dtype) for x in arrays]


def recurrence(query, key, value, g, beta, state, scale):
    """(out, final state): S = (I - beta k k^T) Diag(e^g) S + beta k v^T, as written."""
    n, h = g.shape[2:]
    query, key = (jnp.repeat(x, n // x.shape[2], axis=2) for x in (query, key))

    def token(state, given):
        query, key, value, g, beta = given
        k, write = key[..., None], beta[..., None, None]
        erase = jnp.eye(h) - write * k * jnp.swapaxes(k, -1, -2)
        state = erase @ (jnp.exp(g)[..., None] * state)
        state = state + write * k * value[..., None, :]
        return state, scale * jnp.einsum("bnhv,bnh->bnv", state, query)

    tokens = [jnp.moveaxis(x, 1, 0) for x in (query, key, value, g, beta)]
    state, out = jax.lax.scan(token, state, tokens)
    return jnp.moveaxis(out, 0, 1), state


@functools.cache
def truth():
    """Operands, cotangents, and what the recurrence and its derivative give."""
    with jax.enable_x64(True):
        operands = as_jax(draw(2, 7, 2, 2, 4, 3))
        cotangents = jnp.cos(operands[2]), jnp.cos(operands[5])

        @jax.jit
        def run(*operands):
            rule = functools.partial(recurrence, scale=0.5)  # 4 ** -0.5
            results, pull = jax.vjp(rule, *operands)
            return results, pull(cotangents)

        return operands, cotangents, run(*operands)


@pytest.mark.parametrize(
    "chunk_size", [1, pytest.param(3, marks=pytest.mark.full), 4, 64]
)
def test_every_chunk_size_is_the_recurrence_in_float64(chunk_size):
    operands, cotangents, (results, grads) = truth()
    with jax.enable_x64(True):

        @jax.jit
        def run(*operands):
            rule = functools.partial(kimi_delta_attention, chunk_size=chunk_size)
            found, pull = jax.vjp(rule, *operands)
            return found, pull(cotangents)

        found, pulled = run(*operands)
    for y, e in zip(found, results, strict=True):
        np.testing.assert_allclose(y, e, rtol=1e-12, atol=1e-12)
    for y, e in zip(pulled, grads, strict=True):
        np.testing.assert_allclose(y, e, rtol=1e-11, atol=1e-12)


def test_equal_decays_of_all_channels_are_the_gated_delta_rule():
    query, key, value, g, beta, state = as_jax(draw(1, 9, 1, 2, 4, 3), jnp.float32)
    operands = (value, g[..., :1] + 0 * g, beta, state)
    found = kimi_delta_attention(query, key, *operands, chunk_size=8)
    operands = (value, g[..., 0], beta, state)
    expected = gated_delta_rule(query, key, *operands, chunk_size=8)
    for y, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(y, e, atol=1e-5)


def test_products_decay_between_their_tokens_whatever_the_decays_are():
    """Small decays before, behind and beside huge ones and infinities, in float32.

    The quotient of two running products, which the published form takes, has no digits
    left of these or is NaN.
    """
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 1, 1, 1, 1, 6, 3))
    g = np.full((1, 1, 1, 1, 6, 3), -1e-3)
    g[..., 2, 0], g[..., 3, 1], g[..., 3, 2] = -3e4, -np.inf, -80.0
    [found] = jax.jit(decayed_products)(*([jnp.float32(x)], *map(jnp.float32, (y, g))))
    for i, j in np.ndindex(6, 6):
        between = np.exp(g[0, 0, 0, 0, j + 1 : i + 1].sum(0)) * (j <= i)
        e = np.sum(x[0, 0, 0, 0, i] * y[0, 0, 0, 0, j] * between)
        np.testing.assert_allclose(found[0, 0, 0, 0, i, j], e, rtol=1e-5, atol=1e-6)


def test_g_of_minus_infinity_forgets_and_all_gradients_are_finite():
    operands = draw(1, 6, 1, 1, 3, 3)
    operands[3][:, 2] = -np.inf
    operands[3][:, 4, 0, 1] = -np.inf
    f = functools.partial(kimi_delta_attention, chunk_size=4)

    @jax.jit
    def run(*x):
        (out, state), pull = jax.vjp(f, *x)
        late = jnp.ones_like(out).at[:, :2].set(0)
        return out, pull((late, jnp.ones_like(state)))

    out, grads = run(*as_jax(operands, jnp.float32))
    for d in grads:
        assert np.isfinite(d).all()
    assert not np.any(grads[5]) and not np.any(grads[2][:, :2])
    alone = [x[:, 2:] for x in operands[:5]]
    expected, _ = recurrence(*alone, np.zeros((1, 1, 3, 3)), scale=3**-0.5)
    np.testing.assert_allclose(out[:, 2:], expected, atol=1e-5)


def test_sequences_packed_in_a_row_and_padding():
    """By ids, with states of their own, and cut off; padding may hold anything."""
    lengths, operands = (3, 1, 4), draw(1, 10, 1, 2, 3, 2)
    starts = jnp.asarray(np.cumsum([0, *lengths]))
    states = draw(3, 1, 1, 2, 3, 2, seed=1)[5]
    padded = [x.copy() for x in operands[:5]]
    for x in padded:
        x[:, 8:] = np.nan

    @jax.jit
    def run(*token):
        packed = functools.partial(kimi_delta_attention, chunk_size=4)
        first = jnp.float32(states[:1])
        ids = jnp.searchsorted(starts[1:], jnp.arange(10), side="right")[None]
        active = {"active_length": jnp.array([8]), "segment_ids": ids}
        own = packed(*token, jnp.float32(states), cu_seqlens=starts, longest=4)
        return packed(*token, first, **active), own

    (by_ids, last), (out, final) = run(*as_jax(padded, jnp.float32))
    assert not np.any(by_ids[:, 8:]) and not np.any(out[:, 8:])
    start = 0
    for i, n in enumerate(lengths):
        at = slice(start, start + n)
        part = [x[:, at] for x in operands[:5]]
        expected, state = recurrence(*part, states[i : i + 1], scale=3**-0.5)
        np.testing.assert_allclose(out[:, at], expected, atol=1e-5)
        np.testing.assert_allclose(final[i : i + 1], state, atol=1e-5)
        if i:  # the first one's state is given, then there is none
            zeros = np.zeros_like(states[:1])
            expected, state = recurrence(*part, zeros, scale=3**-0.5)
        np.testing.assert_allclose(by_ids[:, at], expected, atol=1e-5)
        start += n
    np.testing.assert_allclose(last, state, atol=1e-5)


def test_errors_name_the_operand():
    query, key, value, g, beta, _ = as_jax(draw(2, 4, 1, 2, 3, 2), jnp.float32)
    rule = kimi_delta_attention
    with pytest.raises(TypeError, match="kimi_delta_attention: dim `h` is 3"):
        rule(query, key, value, g[..., :1], beta)
    with pytest.raises(TypeError, match=r"`active_length` must have shape \(2,\)"):
        rule(query, key, value, g, beta, active_length=jnp.array([3]))
    with pytest.raises(TypeError, match=r"`segment_ids` must have shape \(2, 4\)"):
        rule(query, key, value, g, beta, segment_ids=jnp.zeros((2, 3), int))
    with pytest.raises(ValueError, match="`cu_seqlens` is of one packed row"):
        rule(query, key, value, g, beta, cu_seqlens=jnp.array([0, 4]))
    with pytest.raises(ValueError, match="`chunk_size` is 0"):
        rule(query, key, value, g, beta, chunk_size=0)
