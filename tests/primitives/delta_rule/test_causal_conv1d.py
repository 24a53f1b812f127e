"""causal_conv1d: the formula and its gradients, states, packed and padded rows."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import causal_conv1d, causal_conv1d_step
from jaxkern.testing.checks import bf16, case, f32, i32

CASES = [
    case(
        "plain",
        x=f32(1, 5, 2),
        weight=f32(2, 3),
        bias=f32(2),
        initial_state=f32(1, 2, 2),
        segment_ids=i32(1, 5, high=2),
        activation="silu",
    ),
    case("no_state", full=True, x=f32(2, 4, 4), weight=f32(4, 4)),
    case("one_tap", full=True, x=f32(2, 3, 2), weight=f32(2, 1), bias=f32(2)),
    case("no_tokens", full=True, x=f32(2, 0, 2), weight=f32(2, 3)),
    case(
        "qwen3_next",
        full=True,
        x=bf16(1, 32, 8192),
        weight=bf16(8192, 4),
        activation="silu",
    ),
]


def formula(x, weight, bias=0.0, state=None, ids=None, silu=False):
    """One output at a time in float64."""
    b, t, d = x.shape
    w = weight.shape[1]
    state = np.zeros((b, w - 1, d)) if state is None else state
    z = np.zeros(x.shape)
    for bi, i in np.ndindex(b, t):
        for j in range(w):
            at = i - (w - 1) + j
            source = x[bi, at] if at >= 0 else state[bi, w - 1 + at]
            id_there = None if ids is None else ids[bi, max(at, 0)]
            if ids is None or id_there == ids[bi, i]:
                z[bi, i] += weight[:, j] * source
    z += bias
    return z / (1 + np.exp(-z)) if silu else z


def draw(b=2, t=6, d=3, w=4):
    rng = np.random.default_rng(0)
    shapes = ((b, t, d), (d, w), (d,), (b, w - 1, d))
    return [rng.standard_normal(s) for s in shapes]


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("packed", [False, True])
def test_values_match_the_formula(activation, packed):
    x, weight, bias, state = draw()
    ids = np.array([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 0, 0]]) if packed else None
    y, final = causal_conv1d(
        *map(jnp.float32, (x, weight, bias, state)),
        segment_ids=ids,
        activation=activation,
    )
    expected = formula(x, weight, bias, state, ids, silu=activation == "silu")
    np.testing.assert_allclose(y, expected, atol=1e-5)
    last = x[:, -3:]
    if packed:  # only inputs of the last segment go on
        last = last * (ids[:, -3:] == ids[:, -1:])[..., None]
    np.testing.assert_array_equal(final, np.float32(last))


def test_gradients_match_the_formula():
    x, weight, bias, state = draw(t=5)
    dy = np.cos(x)
    with jax.enable_x64(True):
        _, pull = jax.vjp(lambda *v: causal_conv1d(*v)[0], x, weight, bias, state)
        dx, dweight, dbias, dstate = pull(jnp.asarray(dy))
    dinputs, expected_dweight = np.zeros((2, 8, 3)), np.zeros((3, 4))
    inputs = np.concatenate([state, x], axis=1)
    for i in range(5):
        for j in range(4):
            dinputs[:, i + j] += weight[:, j] * dy[:, i]
            expected_dweight[:, j] += (dy[:, i] * inputs[:, i + j]).sum(0)
    np.testing.assert_allclose(dx, dinputs[:, 3:], rtol=1e-12)
    np.testing.assert_allclose(dstate, dinputs[:, :3], rtol=1e-12)
    np.testing.assert_allclose(dweight, expected_dweight, rtol=1e-12)
    np.testing.assert_allclose(dbias, dy.sum((0, 1)), rtol=1e-12)


@pytest.mark.parametrize("cut", [0, 1, 2, 6])
def test_a_sequence_cut_anywhere_continues_through_its_state(cut):
    x, weight, bias, state = map(jnp.float32, draw())
    f = functools.partial(causal_conv1d, activation="silu")
    y, final = f(x, weight, bias, state)
    first, between = f(x[:, :cut], weight, bias, state)
    second, last = f(x[:, cut:], weight, bias, between)
    np.testing.assert_allclose(y, jnp.concatenate([first, second], 1), atol=1e-6)
    np.testing.assert_array_equal(final, last)


def test_steps_are_the_sequence():
    x, weight, bias, state = map(jnp.float32, draw())
    expected, final = causal_conv1d(x, weight, bias, state, activation="silu")
    for i in range(x.shape[1]):
        y, state = causal_conv1d_step(x[:, i], weight, bias, state, activation="silu")
        np.testing.assert_allclose(y, expected[:, i], atol=1e-6)
    np.testing.assert_array_equal(state, final)


def test_the_final_state_has_a_gradient():
    x, weight, bias, state = map(jnp.float32, draw(t=2))
    dfinal = jnp.arange(18.0).reshape(2, 3, 3)
    _, pull = jax.vjp(lambda x, s: causal_conv1d(x, weight, bias, s)[1], x, state)
    dx, dstate = pull(dfinal)  # the final state is the last of the state, and x
    np.testing.assert_array_equal(dx, dfinal[:, 1:])
    np.testing.assert_array_equal(dstate[:, 2], dfinal[:, 0])
    assert not np.any(dstate[:, :2])


@pytest.mark.parametrize("packed", [False, True])
def test_padding_behind_the_active_length_does_not_enter_the_state(packed):
    x, weight, bias, state = map(jnp.float32, draw())
    ids = jnp.array([[0, 0, 1, 1, 1, 1]] * 2) if packed else None
    lengths = np.array([1, 4])
    padded = jnp.where(jnp.arange(6)[:, None] >= lengths[:, None, None], jnp.nan, x)
    y, final = causal_conv1d(
        padded, weight, bias, state, active_length=lengths, segment_ids=ids
    )
    for b, n in enumerate(lengths):
        one = slice(b, b + 1)
        part = None if ids is None else ids[one, :n]
        expected, last = causal_conv1d(
            x[one, :n], weight, bias, state[one], segment_ids=part
        )
        np.testing.assert_allclose(y[one, :n], expected, atol=1e-6)
        np.testing.assert_array_equal(final[one], last)


@pytest.mark.parametrize("w", [4, 1])
@pytest.mark.parametrize("with_state", [True, False])
def test_packed_sequences_have_states_of_their_own(with_state, w):
    """Short, empty and long ones, and NaN behind the last; gradients by sequence."""
    rng = np.random.default_rng(1)
    starts, t, d = np.array([0, 2, 2, 7, 8]), 11, 3
    x, weight, bias = (rng.standard_normal(s) for s in [(1, t, d), (d, w), d])
    x[:, 8:] = np.nan
    states = rng.standard_normal((4, w - 1, d)) if with_state else None

    def packed(x, weight, bias, states):
        return causal_conv1d(
            x, weight, bias, states, cu_seqlens=jnp.asarray(starts), activation="silu"
        )

    def one_by_one(x, weight, bias, states):
        parts, finals = [], []
        for n, (begin, end) in enumerate(itertools.pairwise(starts)):
            state = None if states is None else states[n : n + 1]
            y, final = causal_conv1d(
                x[:, begin:end], weight, bias, state, activation="silu"
            )
            parts.append(y)
            finals.append(final)
        parts.append(jnp.zeros((1, t - starts[-1], d)))
        return jnp.concatenate(parts, 1), jnp.concatenate(finals)

    with jax.enable_x64(True):
        operands = (x, weight, bias, states)
        operands = [y if y is None else jnp.asarray(y) for y in operands]
        shapes = (1, t, d), (4, w - 1, d)
        dy = tuple(jnp.asarray(rng.standard_normal(s)) for s in shapes)

        def with_gradients(f):
            results, pull = jax.vjp(f, *operands)
            return *results, pull(dy)

        y, final, grads = jax.jit(with_gradients, static_argnums=0)(packed)
        expected, last, each = jax.jit(with_gradients, static_argnums=0)(one_by_one)
        np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-14)
        np.testing.assert_array_equal(final, last)
        for n, (begin, end) in enumerate(itertools.pairwise(starts)):
            state = None if states is None else states[n : n + 1]
            value = formula(x[:, begin:end], weight, bias, state, silu=True)
            np.testing.assert_allclose(y[:, begin:end], value, rtol=1e-11, atol=1e-13)
        for g, e in zip(grads, each, strict=True):
            if g is not None:
                np.testing.assert_allclose(g, e, rtol=1e-11, atol=1e-13)


def test_packed_sequences_under_jit_and_in_half_precision():
    x, weight, _, _ = draw(b=1)
    state = np.random.default_rng(2).standard_normal((2, 3, 3))
    x, weight = jnp.bfloat16(x), jnp.bfloat16(weight)
    f = jax.jit(lambda starts: causal_conv1d(x, weight, None, state, cu_seqlens=starts))
    y, final = f(jnp.asarray([0, 5, 6]))
    first, left = causal_conv1d(x[:, :5], weight, None, jnp.float32(state[:1]))
    assert y.dtype == jnp.bfloat16 and final.dtype == jnp.float32
    np.testing.assert_array_equal(np.float32(y[:, :5]), np.float32(first))
    np.testing.assert_array_equal(final[:1], left)


def test_a_step_uses_the_slots_of_a_pool():
    """Rows without a slot, -1 or behind the pool, give zeros and write nothing."""
    rng = np.random.default_rng(3)
    pool, x = rng.standard_normal((5, 3, 2)), rng.standard_normal((4, 2))
    weight, bias = rng.standard_normal((2, 4)), rng.standard_normal(2)
    slots = np.array([3, -1, 0, 5])
    step = functools.partial(causal_conv1d_step, activation="silu")

    @jax.jit
    def f(x, pool, slots):
        return step(x, weight, bias, pool, state_indices=slots)

    with jax.enable_x64(True):
        y, new = f(jnp.asarray(x), jnp.asarray(pool), jnp.asarray(slots))
        expected, states = np.zeros((4, 2)), pool.copy()
        for row in (0, 2):
            held = pool[slots[row]]
            z = formula(x[row][None, None], weight, bias, held[None], silu=True)
            expected[row] = z[0, 0]
            states[slots[row]] = np.concatenate([held[1:], x[row][None]])
        np.testing.assert_allclose(y, expected, rtol=1e-12)
        np.testing.assert_array_equal(new, states)
        dx, dpool = jax.grad(lambda x, pool: f(x, pool, slots)[1].sum(), (0, 1))(
            jnp.asarray(x), jnp.asarray(pool)
        )
        np.testing.assert_array_equal(dx, [[1, 1], [0, 0], [1, 1], [0, 0]])
        written = np.ones((5, 3, 2))
        written[[0, 3], 0] = 0  # the oldest inputs leave
        np.testing.assert_array_equal(dpool, written)


def test_states_and_slots_that_do_not_fit_are_refused():
    x, weight, _, state = map(jnp.float32, draw(b=1))
    with pytest.raises(ValueError, match="`cu_seqlens` is of one packed row, and"):
        causal_conv1d(jnp.ones((2, 6, 3)), weight, cu_seqlens=jnp.asarray([0, 6]))
    with pytest.raises(TypeError, match=r"`initial_state` must .* \(2, 3, 3\), got"):
        causal_conv1d(x, weight, None, state, cu_seqlens=jnp.asarray([0, 2, 6]))
    with pytest.raises(TypeError, match="causal_conv1d: dim `d` is 3 in `x` but 2"):
        causal_conv1d(x, weight[:2], cu_seqlens=jnp.asarray([0, 6]))
    with pytest.raises(TypeError, match="causal_conv1d_step: `state_indices` must be"):
        causal_conv1d_step(x[0], weight, None, state, state_indices=jnp.zeros(2, int))


def test_errors_name_the_operand():
    x, weight, bias, state = map(jnp.float32, draw())
    with pytest.raises(TypeError, match="causal_conv1d: `weight` has 4 taps and"):
        causal_conv1d(x, weight, bias, state[:, 1:])
    with pytest.raises(TypeError, match="causal_conv1d: dim `d` is 3 in `x` but 2"):
        causal_conv1d(x, weight[:2])
    with pytest.raises(TypeError, match="`active_length` must have shape"):
        causal_conv1d(x, weight, active_length=jnp.ones((3,), int))
    with pytest.raises(ValueError, match="`activation` must be 'silu' or None"):
        causal_conv1d(x, weight, activation="gelu")
