"""state_space_dual: the recurrence in float64, its gradient, chunks, packed rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import selective_scan, state_space_dual
from jaxkern.testing.checks import bf16, boolean, case, f32, uniform


def shapes(rows, t, k, g, h, state, spec=f32):
    return dict(
        x=spec(rows, t, k * g, h),
        step=uniform(rows, t, k * g),
        a=uniform(k * g, low=-2.0, high=-0.1),
        b=spec(rows, t, k, state),
        c=spec(rows, t, k, state),
    )


CASES = [
    case(
        "plain", **shapes(1, 3, 1, 3, 2, 3), initial_state=f32(1, 3, 2, 3), chunk_size=2
    ),
    case("even", full=True, **shapes(2, 4, 2, 2, 2, 2), chunk_size=4),
    case("no_tokens", full=True, **shapes(1, 0, 1, 3, 3, 1)),
    case(
        "many_chunks",
        full=True,
        **shapes(2, 37, 2, 2, 4, 3),
        initial_state=f32(2, 4, 4, 3),
        starts=boolean(2, 37, probability=0.1),
        chunk_size=8,
    ),
    case("granite_4", full=True, **shapes(1, 130, 1, 48, 64, 128, bf16)),
]


def draw(rows, t, k, g, h, state, seed=0):
    rng = np.random.default_rng([seed, rows, t, k, g, h, state])
    n = k * g
    x, step = rng.standard_normal((rows, t, n, h)), rng.exponential(size=(rows, t, n))
    b, c = rng.standard_normal((2, rows, t, k, state))
    a = -rng.exponential(size=n)
    return x, step, a, b, c, rng.standard_normal((rows, n, h, state))


def as_jax(arrays, dtype=None):
    return [jnp.asarray(x, dtype) for x in arrays]


def recurrence(x, step, a, b, c, state):
    """(y, final state), one token after the other."""
    b, c = (jnp.repeat(y, x.shape[2] // y.shape[2], axis=2) for y in (b, c))
    y = []
    for i in range(x.shape[1]):
        s = step[:, i, :, None, None]
        state = jnp.exp(s * a[:, None, None]) * state
        state = state + s * x[:, i, :, :, None] * b[:, i, :, None]
        y.append(jnp.einsum("rnhs,rns->rnh", state, c[:, i]))
    return jnp.stack(y, 1), state


@pytest.mark.parametrize("chunk_size", [1, 3, 64])
def test_every_chunk_size_is_the_recurrence_in_float64(chunk_size):
    with jax.enable_x64(True):
        operands = as_jax(draw(2, 7, 2, 2, 3, 4))
        cotangents = jnp.cos(operands[0]), jnp.cos(operands[5])
        f = functools.partial(state_space_dual, chunk_size=chunk_size)

        @functools.partial(jax.jit, static_argnums=0)
        def run(rule, *operands):
            results, pull = jax.vjp(rule, *operands)
            return *results, *pull(cotangents)

        expected = run(recurrence, *operands)
        found = run(f, *operands)
    for y, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(y, e, rtol=1e-11, atol=1e-12)


def test_it_is_the_selective_scan_with_equal_decays():
    x, step, a, b, c, state = as_jax(draw(2, 9, 2, 2, 3, 4), jnp.float32)
    found = jax.jit(functools.partial(state_space_dual, chunk_size=4))(
        x, step, a, b, c, state
    )
    of_channels = (
        x.reshape(2, 9, 12),
        jnp.repeat(step, 3, axis=2),
        jnp.repeat(a, 3)[:, None] * jnp.ones(4),
    )
    y, final = jax.jit(selective_scan)(
        *of_channels, b, c, initial_state=state.reshape(2, 12, 4)
    )
    np.testing.assert_allclose(found[0].reshape(y.shape), y, atol=1e-4)
    np.testing.assert_allclose(found[1].reshape(final.shape), final, atol=1e-4)


def test_sequences_packed_in_a_row_and_padding():
    """By ids, with states of their own, and cut off; padding may hold anything."""
    lengths, operands = (3, 1, 4), draw(1, 10, 1, 2, 3, 2)
    starts = jnp.asarray(np.cumsum([0, *lengths]))
    states = draw(3, 1, 1, 2, 3, 2, seed=1)[5]
    padded = [y.copy() for y in operands[:5]]
    for i in (0, 1, 3, 4):
        padded[i][:, 8:] = np.nan

    @jax.jit
    def run(*token):
        packed = functools.partial(state_space_dual, chunk_size=4)
        first = jnp.float32(states[:1])
        ids = jnp.searchsorted(starts[1:], jnp.arange(10), side="right")[None]
        active = {"active_length": jnp.array([8]), "segment_ids": ids}
        own = packed(*token, jnp.float32(states), cu_seqlens=starts, longest=4)
        return packed(*token, first, **active), own

    (by_ids, last), (y, final) = run(*as_jax(padded, jnp.float32))
    assert not np.any(by_ids[:, 8:]) and not np.any(y[:, 8:])
    start, (x, step, a, b, c, _) = 0, operands
    for i, n in enumerate(lengths):
        at = np.s_[:, start : start + n]
        part = (x[at], step[at], a, b[at], c[at])
        expected, state = recurrence(*part, states[i : i + 1])
        np.testing.assert_allclose(y[at], expected, atol=1e-5)
        np.testing.assert_allclose(final[i : i + 1], state, atol=1e-5)
        if i:  # the first one's state is given, then there is none
            expected, state = recurrence(*part, np.zeros_like(states[:1]))
        np.testing.assert_allclose(by_ids[at], expected, atol=1e-5)
        start += n
    np.testing.assert_allclose(last, state, atol=1e-5)


def test_errors_name_the_operand():
    x, step, a, b, c, _ = as_jax(draw(2, 4, 2, 2, 3, 2), jnp.float32)
    with pytest.raises(TypeError, match="state_space_dual: dim `state` is 2 in `b`"):
        state_space_dual(x, step, a, b, c[..., :1])
    with pytest.raises(TypeError, match="`x` is 3, not a multiple of 2"):
        state_space_dual(x[:, :, :3], step[..., :3], a[:3], b, c)
    with pytest.raises(TypeError, match=r"`segment_ids` must have shape \(2, 4\)"):
        state_space_dual(x, step, a, b, c, segment_ids=jnp.zeros((2, 3), int))
    with pytest.raises(ValueError, match="`chunk_size` is 0"):
        state_space_dual(x, step, a, b, c, chunk_size=0)
