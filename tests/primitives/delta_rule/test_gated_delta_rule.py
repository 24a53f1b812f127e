"""gated_delta_rule: the recurrence and its backward in NumPy, chunks, packed rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import gated_delta_rule, segment_ids_from_cu_seqlens
from jaxkern.primitives.delta_rule import gated_delta_chunks as stages
from jaxkern.primitives.delta_rule.gated_delta_rule import gated_delta_rule_p
from jaxkern.primitives.delta_rule.packed_sequences import sequences_in_a_row
from jaxkern.testing.checks import bf16, case, f16, f32, uniform


def shapes(b, t, k, g, h, hv, spec=f32, state=True, channels=(), **options):
    """`channels` of the keys have decays of their own."""
    operands = dict(
        query=spec(b, t, k, h),
        key=spec(b, t, k, h, scale=h**-0.5),
        value=spec(b, t, k * g, hv),
        g=uniform(b, t, k * g, *channels, low=-1.0, high=0.0),
        beta=uniform(b, t, k * g),
        initial_state=f32(b, k * g, h, hv) if state else None,
    )
    return dict(operands, scale=max(h, 1) ** -0.5, **options)


CASES = [
    # odd but for hv, since each dim that can be cut costs four compilations
    case("plain", **shapes(1, 3, 1, 3, 3, 2), chunk_size=2),
    case("even", full=True, **shapes(2, 4, 2, 2, 2, 2), chunk_size=2),
    case(
        "one_token_at_a_time",
        full=True,
        **shapes(1, 3, 2, 1, 2, 2, state=False),
        chunk_size=1,
    ),
    # odd again: jaxlib 0.11.2 crashes on empty arrays in shard_map
    case("no_tokens", full=True, **shapes(1, 0, 1, 3, 3, 3)),
    case("many_chunks", full=True, **shapes(1, 37, 2, 2, 8, 4), chunk_size=8),
    case("qwen3_next", full=True, **shapes(1, 130, 2, 2, 128, 128, bf16, state=False)),
    case("half", full=True, **shapes(2, 70, 1, 2, 64, 32, f16), chunk_size=32),
]


# The definition and its backward, one token and head at a time in float64.


def recurrence(query, key, value, g, beta, state, scale):
    """(out, final state, every state) with state S_t = Ŝ + beta k (v - Ŝ^T k)^T."""
    b, t, n, hv = value.shape
    group = n // key.shape[2]
    out, states = np.zeros(value.shape), np.zeros((b, t + 1, n, key.shape[3], hv))
    states[:, 0] = state
    for bi, i, ni in np.ndindex(b, t, n):
        q, k = query[bi, i, ni // group], key[bi, i, ni // group]
        decayed = np.exp(g[bi, i, ni]) * states[bi, i, ni]
        error = value[bi, i, ni] - decayed.T @ k
        states[bi, i + 1, ni] = decayed + beta[bi, i, ni] * np.outer(k, error)
        out[bi, i, ni] = scale * states[bi, i + 1, ni].T @ q
    return out, states[:, -1], states


def recurrence_backward(query, key, value, g, beta, state, scale, dout, dfinal):
    """Gradients of all operands by the reverse recurrence."""
    b, t, n, _ = value.shape
    group = n // key.shape[2]
    states = recurrence(query, key, value, g, beta, state, scale)[2]
    dq, dk, dv, dg, dbeta = (np.zeros(x.shape) for x in (query, key, value, g, beta))
    dstate = dfinal.copy()
    for bi, i, ni in reversed(list(np.ndindex(b, t, n))):
        ki = ni // group
        q, k, do = query[bi, i, ki], key[bi, i, ki], dout[bi, i, ni]
        decay, strength = np.exp(g[bi, i, ni]), beta[bi, i, ni]
        decayed = decay * states[bi, i, ni]
        error = value[bi, i, ni] - decayed.T @ k
        d = dstate[bi, ni] + scale * np.outer(q, do)
        dq[bi, i, ki] += scale * states[bi, i + 1, ni] @ do
        dbeta[bi, i, ni] = k @ d @ error
        derror = strength * d.T @ k
        dv[bi, i, ni] = derror
        dk[bi, i, ki] += strength * d @ error - decayed @ derror
        ddecayed = d - np.outer(k, derror)
        dg[bi, i, ni] = np.sum(ddecayed * decayed)
        dstate[bi, ni] = decay * ddecayed
    return dq, dk, dv, dg, dbeta, dstate


def draw(b, t, k, g, h, hv, seed=0):
    """NumPy operands: unit keys, as the models normalise them, and a state."""
    rng = np.random.default_rng([seed, b, t, k, g, h, hv])
    query, key = rng.standard_normal((2, b, t, k, h))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = rng.standard_normal((b, t, k * g, hv))
    decay = -rng.exponential(size=(b, t, k * g))
    beta = rng.uniform(size=(b, t, k * g))
    return query, key, value, decay, beta, rng.standard_normal((b, k * g, h, hv))


def as_jax(arrays, dtype=None):
    return [jnp.asarray(x, dtype) for x in arrays]


@pytest.mark.parametrize("chunk_size", [1, 3, 64])
def test_every_chunk_size_is_the_recurrence_in_float64(chunk_size):
    operands = draw(2, 7, 2, 2, 4, 3)
    dout, dfinal = (np.cos(x) for x in (operands[2], operands[5]))
    with jax.enable_x64(True):
        f = functools.partial(gated_delta_rule, chunk_size=chunk_size)
        (out, final), pull = jax.vjp(jax.jit(f), *as_jax(operands))
        grads = pull(tuple(as_jax((dout, dfinal))))
    expected, state, _ = recurrence(*operands, scale=0.5)  # 4 ** -0.5
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(final, state, rtol=1e-12, atol=1e-12)
    expected = recurrence_backward(*operands, 0.5, dout, dfinal)
    for actual, e in zip(grads, expected, strict=True):
        np.testing.assert_allclose(actual, e, rtol=1e-11, atol=1e-12)


def test_the_stages_are_those_of_the_chunk_form():
    # one chunk of one head, stage by stage, with running sums G of g
    query, key, value, g, beta, state = draw(1, 4, 1, 1, 3, 2)
    q, k, v, s = query[0, :, 0], key[0, :, 0], value[0, :, 0], state[0, 0]
    G, b = np.cumsum(g[0, :, 0]), beta[0, :, 0, None]
    decay = np.tril(np.exp(G[:, None] - G))
    A = np.tril(b * (k @ k.T) * decay, -1)
    T = np.linalg.inv(np.eye(4) + A)
    u, w = T @ (b * v), T @ (b * np.exp(G)[:, None] * k)
    v_new = u - w @ s
    after = np.exp(G[-1]) * s + k.T @ (np.exp(G[-1] - G)[:, None] * v_new)
    o = 0.7 * (np.exp(G)[:, None] * (q @ s) + (q @ k.T * decay) @ v_new)
    with jax.enable_x64(True):
        x = stages.chunks_of(*as_jax((query, key, value, g, beta, state)), 4)
        d = stages.chunk_decays(x.g)
        kkt = stages.chunk_kkt(x.key, x.beta, d)
        inverse = jnp.asarray(T)[(None,) * 4]
        wu = stages.recompute_w_u(inverse, x.key, x.value, x.beta, d)
        new = stages.chunk_states(x.key, *wu, d, x.state)
        out = stages.chunk_output(x.query, x.key, new[1], new[0], d, 0.7)
        actual = (*d[:3], kkt, *wu, *new, out)
    expected = (np.exp(G), decay, np.exp(G[-1] - G), A, w, u, s, v_new, after, o)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.squeeze(a), e, rtol=1e-12, atol=1e-14)


def test_float32_is_near_the_recurrence_over_several_chunks():
    operands = draw(1, 100, 1, 2, 16, 8)
    expected, state, _ = recurrence(*operands, scale=0.25)
    for chunk_size in (1, 16, 64):
        out, final = jax.jit(
            functools.partial(gated_delta_rule, chunk_size=chunk_size)
        )(*as_jax(operands, jnp.float32))
        np.testing.assert_allclose(out, expected, atol=1e-5)
        np.testing.assert_allclose(final, state, atol=1e-5)


def test_small_decays_survive_beside_a_huge_one():
    # the difference of running sums near -30000 would have steps of 2e-3
    query, key, value, g, beta, state = draw(1, 16, 1, 1, 4, 4)
    g[:] = -1e-3
    g[:, 3] = -3e4
    out, _ = gated_delta_rule(*as_jax((query, key, value, g, beta, state), jnp.float32))
    expected, *_ = recurrence(query, key, value, g, beta, state, 0.5)
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_tokens_behind_the_last_sequence_make_no_nan_on_the_way():
    with jax.debug_nans(True):
        row = sequences_in_a_row(jnp.ones((2, 3, 1)), jnp.array([0, 2, 4]), 6)
    np.testing.assert_array_equal(row[0, :, 0], [1, 1, 1, 1, 0, 0])


def test_g_of_minus_infinity_forgets_and_all_gradients_are_finite():
    operands = draw(1, 6, 1, 1, 3, 3)
    operands[3][:, 2] = -np.inf
    grad = jax.grad(lambda *x: gated_delta_rule(*x, chunk_size=4)[0].sum(), range(6))
    for d in grad(*as_jax(operands, jnp.float32)):
        assert np.isfinite(d).all()
    out, _ = gated_delta_rule(*as_jax(operands, jnp.float32), chunk_size=4)
    alone = [x[:, 2:] for x in operands[:5]]
    expected, _ = gated_delta_rule(*as_jax(alone, jnp.float32), chunk_size=4)
    np.testing.assert_allclose(out[:, 2:], expected, atol=1e-6)


def test_packed_sequences_do_not_see_each_other():
    lengths = (3, 1, 5)
    operands = draw(1, 9, 2, 1, 3, 2)
    ids = segment_ids_from_cu_seqlens(np.cumsum([0, *lengths]), 9)
    np.testing.assert_array_equal(ids, [[0, 0, 0, 1, 2, 2, 2, 2, 2]])
    f = functools.partial(gated_delta_rule, segment_ids=ids, chunk_size=4)
    (out, final), pull = jax.vjp(f, *as_jax(operands, jnp.float32))
    start, state = 0, operands[5]
    for n in lengths:
        part = [x[:, start : start + n] for x in operands[:5]]
        expected, last, _ = recurrence(*part, state, scale=3**-0.5)
        np.testing.assert_allclose(out[:, start : start + n], expected, atol=1e-5)
        start, state = start + n, np.zeros_like(state)
    np.testing.assert_allclose(final, last, atol=1e-5)
    grads = pull((jnp.zeros_like(out).at[:, 4:].set(1.0), final))
    for d in grads[:5]:  # what the last sequence gives does not depend on the others
        np.testing.assert_array_equal(d[:, :4], np.zeros_like(d[:, :4]))
    assert not np.any(grads[5])


@pytest.mark.full
def test_packed_sequences_have_a_state_each():
    lengths = (3, 0, 1, 4)
    query, key, value, g, beta, _ = draw(1, 10, 2, 1, 3, 2)
    state = draw(4, 1, 2, 1, 3, 2, seed=1)[5]
    starts = jnp.asarray(np.cumsum([0, *lengths]))

    @jax.jit
    def f(*operands):
        options = dict(cu_seqlens=starts, longest=5, chunk_size=4)
        return gated_delta_rule(*operands, **options)

    operands = as_jax((query, key, value, g, beta, state), jnp.float32)
    (out, final), pull = jax.vjp(f, *operands)
    start = 0
    for i, n in enumerate(lengths):
        part = [x[:, start : start + n] for x in (query, key, value, g, beta)]
        expected, last, _ = recurrence(*part, state[i : i + 1], scale=3**-0.5)
        np.testing.assert_allclose(out[:, start : start + n], expected, atol=1e-5)
        np.testing.assert_allclose(final[i : i + 1], last, atol=1e-5)
        start += n
    assert not np.any(out[:, start:])
    # the gradient of one sequence's final state stays in that sequence
    grads = pull((jnp.zeros_like(out), jnp.zeros_like(final).at[3].set(1.0)))
    moved = [np.flatnonzero(np.any(d[0] != 0, (1, 2))) for d in grads[1:3]]
    np.testing.assert_array_equal(moved, [[4, 5, 6, 7]] * 2)
    assert np.any(grads[5][3]) and not np.any(grads[5][:3])
    long = gated_delta_rule(*operands, cu_seqlens=starts, longest=3, chunk_size=4)[0]
    assert np.isnan(long[:, 7]).all() and np.isfinite(long[:, :7]).all()
    with pytest.raises(ValueError, match="`cu_seqlens` is of one packed row"):
        ids = jnp.zeros((1, 10), int)
        gated_delta_rule(*operands, cu_seqlens=starts, segment_ids=ids)


def test_padding_behind_the_active_length_may_hold_anything():
    operands = draw(2, 6, 1, 2, 3, 2)
    lengths = np.array([4, 6])
    padded = [x.copy() for x in operands]
    for x in padded[:5]:
        x[0, 4:] = np.nan
    f = functools.partial(gated_delta_rule, active_length=lengths, chunk_size=4)
    (out, final), pull = jax.vjp(f, *as_jax(padded, jnp.float32))
    for b, n in enumerate(lengths):
        one = [x[b : b + 1, :n] for x in operands[:5]]
        expected, state, _ = recurrence(*one, operands[5][b : b + 1], scale=3**-0.5)
        np.testing.assert_allclose(out[b : b + 1, :n], expected, atol=1e-5)
        np.testing.assert_allclose(final[b : b + 1], state, atol=1e-5)
    assert not np.any(out[0, 4:])
    for d in pull((jnp.ones_like(out), final))[:5]:
        assert np.isfinite(d).all() and not np.any(d[0, 4:])


def test_a_long_sequence_equals_its_parts_through_the_state():
    operands = as_jax(draw(1, 11, 1, 2, 4, 3), jnp.float32)
    whole, final = gated_delta_rule(*operands, chunk_size=4)
    first, state = gated_delta_rule(*(x[:, :5] for x in operands[:5]), operands[5])
    second, last = gated_delta_rule(*(x[:, 5:] for x in operands[:5]), state)
    np.testing.assert_allclose(
        whole, np.concatenate([first, second], axis=1), atol=1e-5
    )
    np.testing.assert_allclose(final, last, atol=1e-5)


def test_tiled_heads_are_the_block_heads_in_another_order():
    # defect D7: value head i of llama.cpp's order reads key head i % k
    query, key, value, g, beta, state = as_jax(draw(1, 5, 2, 3, 3, 2), jnp.float32)
    tiled = gated_delta_rule(query, key, value, g, beta, state, gqa="tiled")
    out, final, _ = recurrence(
        *(np.tile(x, (1, 1, 3, 1)) for x in (query, key)),
        *(np.asarray(x, np.float64) for x in (value, g, beta, state)),
        scale=3**-0.5,
    )
    np.testing.assert_allclose(tiled[0], out, atol=1e-5)
    np.testing.assert_allclose(tiled[1], final, atol=1e-5)
    block = gated_delta_rule(query, key, value, g, beta, state)
    assert abs(tiled[0] - block[0]).max() > 0.1


def test_scale_is_applied_inside_unless_it_is_one():
    # defect D9: some kernels expect queries that are scaled already
    query, *rest = as_jax(draw(1, 4, 1, 1, 4, 3), jnp.float32)
    out, state = gated_delta_rule(query, *rest)
    scaled, same_state = gated_delta_rule(query / 2, *rest, scale=1.0)
    np.testing.assert_allclose(out, scaled, rtol=1e-5)
    np.testing.assert_array_equal(state, same_state)


def test_a_positive_decay_rate_would_grow_the_state():
    # defect D8: with g <= 0 the state decays by exp(g)
    query, key, value, g, beta, state = as_jax(draw(1, 1, 1, 1, 3, 3), jnp.float32)
    _, final = gated_delta_rule(query, key, value, g, jnp.zeros_like(beta), state)
    np.testing.assert_allclose(final, np.exp(g)[0, 0, 0] * state, rtol=1e-6)
    assert abs(final).max() < abs(state).max()


def test_the_state_maps_keys_to_values():
    # defect D10: [b, n, h, hv], so that reading with a unit key gives back its value
    key = jnp.eye(3)[None, :2, None]  # [1 2 1 3]
    value = jnp.arange(8.0).reshape(1, 2, 1, 4)
    ones = jnp.ones((1, 2, 1))
    out, state = gated_delta_rule(key, key, value, 0 * ones, ones, scale=1.0)
    np.testing.assert_allclose(out, value)
    np.testing.assert_allclose(state[0, 0, :2], value[0, :, 0])
    assert state.shape == (1, 1, 3, 4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_keeps_a_float32_state(dtype):
    operands = draw(1, 40, 1, 1, 8, 4)
    rounded = as_jax(operands[:3], dtype)
    out, state = gated_delta_rule(*rounded, *as_jax(operands[3:5], jnp.float32))
    exact = [np.asarray(x, np.float64) for x in rounded]
    expected, final, _ = recurrence(*exact, *operands[3:5], 0.0, scale=8**-0.5)
    assert out.dtype == dtype and state.dtype == jnp.float32
    np.testing.assert_allclose(state, final, atol=1e-5)  # nothing is rounded inside
    atol = float(jnp.finfo(dtype).eps) * abs(expected).max()
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=atol)


def test_the_backward_pass_keeps_the_operands_and_nothing_else():
    operands = as_jax(draw(1, 8, 1, 1, 2, 2), jnp.float32)
    jaxpr = jax.make_jaxpr(jax.grad(lambda *x: gated_delta_rule(*x)[0].sum(), range(6)))
    names = [e.primitive.name for e in jaxpr(*operands).eqns]
    assert names.count("gated_delta_rule") == 1
    (backward,) = [
        e for e in jaxpr(*operands).eqns if e.primitive.name == "gated_delta_rule_bwd"
    ]
    assert len(backward.invars) == 8  # six operands, two cotangents
    assert gated_delta_rule_p.fwd is None


def test_errors_name_the_operand():
    query, key, value, g, beta, state = as_jax(draw(1, 4, 2, 1, 3, 2), jnp.float32)
    with pytest.raises(TypeError, match="gated_delta_rule: dim `t` is 4 in `query`"):
        gated_delta_rule(query, key[:, :3], value, g, beta)
    odd = jnp.ones((1, 4, 3))
    with pytest.raises(TypeError, match=r"`value` is 3, not a multiple of 2"):
        gated_delta_rule(query, key, jnp.ones((1, 4, 3, 2)), odd, odd)
    with pytest.raises(TypeError, match=r"`segment_ids` must have shape \(1, 4\)"):
        gated_delta_rule(query, key, value, g, beta, segment_ids=jnp.zeros((1, 3), int))
    with pytest.raises(TypeError, match=r"`active_length` must have shape \(1,\)"):
        gated_delta_rule(query, key, value, g, beta, active_length=3)
    with pytest.raises(ValueError, match="`chunk_size` is 0"):
        gated_delta_rule(query, key, value, g, beta, chunk_size=0)
    with pytest.raises(ValueError, match="`gqa` must be 'block' or 'tiled'"):
        gated_delta_rule(query, key, value, g, beta, state, gqa="other")
