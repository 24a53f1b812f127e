"""selective_scan: the recurrence in NumPy, chunks, packed and padded rows, states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import segment_ids_from_cu_seqlens, selective_scan
from jaxkern.testing.checks import bf16, boolean, case, f32, uniform


def shapes(rows, t, d, state, spec=f32):
    return dict(
        x=spec(rows, t, d),
        delta=spec(rows, t, d),
        a=uniform(d, state, low=-2.0, high=-0.1),
        b=spec(rows, t, state),
        c=spec(rows, t, state),
    )


FULL = pytest.mark.full
EVERY = dict(delta_softplus=True, chunk_size=2)
CASES = [
    # no gate, one token a chunk: second derivatives compile in half the time
    case("small", **shapes(1, 2, 2, 1), initial_state=f32(1, 2, 1), chunk_size=1),
    case(
        "plain",
        full=True,
        **shapes(1, 2, 2, 1),
        skip=f32(2),
        gate=f32(1, 2, 2),
        delta_bias=f32(2),
        initial_state=f32(1, 2, 1),
        starts=boolean(1, 2),
        **EVERY,
    ),
    case("even", full=True, **shapes(2, 4, 2, 2), gate=f32(2, 4, 2), **EVERY),
    case("no_tokens", full=True, **shapes(1, 0, 3, 1), skip=f32(3)),
    case("many_chunks", full=True, **shapes(2, 37, 3, 4), **EVERY | {"chunk_size": 8}),
    case(
        "mamba_130m",
        full=True,
        **shapes(1, 128, 1536, 16, bf16),
        skip=f32(1536),
        gate=bf16(1, 128, 1536),
        delta_bias=uniform(1536, low=-7.0, high=-2.0),
        delta_softplus=True,
    ),
]


def recurrence(x, delta, a, b, c, skip, gate, bias, state, softplus):
    """(y, final state), one token after the other in float64."""
    y, state = np.zeros(x.shape), state.copy()
    step = delta + bias
    step = np.log1p(np.exp(step)) if softplus else step
    for row, t in np.ndindex(x.shape[:2]):
        s = step[row, t, :, None]
        state[row] = np.exp(s * a) * state[row] + s * b[row, t] * x[row, t, :, None]
        y[row, t] = state[row] @ c[row, t] + skip * x[row, t]
        y[row, t] *= gate[row, t] / (1 + np.exp(-gate[row, t]))
    return y, state


def draw(rows=2, t=7, d=3, state=4):
    rng = np.random.default_rng(0)
    x, delta, gate = rng.standard_normal((3, rows, t, d))
    b, c = rng.standard_normal((2, rows, t, state))
    a, skip, bias = -rng.exponential(size=(d, state)), *rng.standard_normal((2, d))
    return [x, delta, a, b, c, skip, gate, bias, rng.standard_normal((rows, d, state))]


def in_f32(arrays):
    return [jnp.asarray(y, jnp.float32) for y in arrays]


@pytest.mark.parametrize("softplus", [pytest.param(False, marks=FULL), True])
@pytest.mark.parametrize("chunk_size", [pytest.param(1, marks=FULL), 3])
def test_every_chunk_size_is_the_recurrence_in_float64(softplus, chunk_size):
    operands = draw()
    with jax.enable_x64(True):
        f = functools.partial(
            selective_scan, delta_softplus=softplus, chunk_size=chunk_size
        )
        actual = jax.jit(f)(*map(jnp.asarray, operands))
    for y, e in zip(actual, recurrence(*operands, softplus), strict=True):
        np.testing.assert_allclose(y, e, rtol=1e-12, atol=1e-13)


def test_each_group_of_channels_has_its_own_b_and_c():
    """Packed rows and padding too, and the gradients, against a scan for each group."""
    x, delta, a, b, c, skip, gate, bias, state = draw(rows=2, t=5, d=6)
    rng = np.random.default_rng(1)
    b, c = rng.standard_normal((2, 2, 5, 3, 4))  # three groups of two channels
    ids = np.array([[0, 0, 1, 1, 1], [2, 2, 2, 2, 2]])
    options = dict(segment_ids=ids, active_length=np.array([5, 4]), chunk_size=2)

    def grouped(*operands):
        return selective_scan(*operands, delta_softplus=True, **options)

    def each(x, delta, a, b, c, skip, gate, bias, state):
        parts = []
        for n in range(3):
            own = slice(2 * n, 2 * n + 2)
            x_n, delta_n, gate_n = (y[:, :, own] for y in (x, delta, gate))
            part = x_n, delta_n, a[own], b[:, :, n], c[:, :, n]
            part += skip[own], gate_n, bias[own], state[:, own]
            parts.append(selective_scan(*part, delta_softplus=True, **options))
        ys, states = zip(*parts, strict=True)
        return jnp.concatenate(ys, 2), jnp.concatenate(states, 1)

    operands = (x, delta, a, b, c, skip, gate, bias, state)
    with jax.enable_x64(True):
        operands = tuple(map(jnp.asarray, operands))
        (y, final), pull = jax.vjp(jax.jit(grouped), *operands)
        (expected, last), pull_each = jax.vjp(jax.jit(each), *operands)
        np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(final, last, rtol=1e-12, atol=1e-13)
        dy = jnp.cos(y), jnp.cos(final)
        for g, e in zip(pull(dy), pull_each(dy), strict=True):
            np.testing.assert_allclose(g, e, rtol=1e-11, atol=1e-13)
    first = [v[:1, :2] for v in (x, delta, b, c, gate)]
    spread = (np.repeat(v, 2, 2) for v in first[2:4])  # [rows t d state]
    value, h = np.zeros((2, 6)), state[0].copy()
    b6, c6 = spread
    for t in range(2):
        s = np.log1p(np.exp(delta[0, t] + bias))[:, None]
        h = np.exp(s * a) * h + s * b6[0, t] * x[0, t][:, None]
        value[t] = (h * c6[0, t]).sum(-1) + skip * x[0, t]
        value[t] *= gate[0, t] / (1 + np.exp(-gate[0, t]))
    np.testing.assert_allclose(y[0, :2], value, rtol=1e-11)


def test_one_group_is_none():
    operands = in_f32(draw(t=3))
    y, state = selective_scan(*operands)
    for i in (3, 4):
        operands[i] = operands[i][:, :, None]
    same, final = selective_scan(*operands)
    np.testing.assert_array_equal(same, y)
    np.testing.assert_array_equal(final, state)


@pytest.mark.full
def test_one_token_at_a_time_through_the_state():
    *operands, state = in_f32(draw(t=4))
    a, skip, bias = operands[2], operands[5], operands[7]
    whole, final = selective_scan(*operands, state, delta_softplus=True)
    for t in range(4):
        x, delta, b, c, gate = (operands[i][:, t : t + 1] for i in (0, 1, 3, 4, 6))
        y, state = selective_scan(
            x, delta, a, b, c, skip, gate, bias, state, delta_softplus=True
        )
        np.testing.assert_allclose(y[:, 0], whole[:, t], atol=1e-5)
    np.testing.assert_allclose(state, final, atol=1e-5)


@pytest.mark.full
def test_packed_sequences_do_not_see_each_other():
    operands = draw(rows=1, t=6)
    ids = segment_ids_from_cu_seqlens(np.array([0, 2, 6]), 6)
    f = functools.partial(selective_scan, segment_ids=ids, chunk_size=4)
    (y, final), pull = jax.vjp(f, *in_f32(operands))
    x, delta, a, b, c, skip, gate, bias, state = operands
    tail = [v[:, 2:] for v in (x, delta, b, c, gate)]
    zeros = np.zeros_like(state)
    expected, last = recurrence(
        *tail[:2], a, *tail[2:4], skip, tail[4], bias, zeros, False
    )
    np.testing.assert_allclose(y[:, 2:], expected, atol=1e-5)
    np.testing.assert_allclose(final, last, atol=1e-5)
    grads = pull((jnp.zeros_like(y).at[:, 2:].set(1.0), final))
    assert not np.any(grads[8]) and not np.any(grads[0][:, :2])


@pytest.mark.full
@pytest.mark.parametrize("softplus", [False, True])
def test_padding_behind_the_active_length_may_hold_anything(softplus):
    operands = draw(rows=2, t=5)
    padded = in_f32(operands)
    for i in (0, 1, 3, 4, 6):
        padded[i] = padded[i].at[0, 3:].set(jnp.nan)
    f = functools.partial(
        selective_scan, active_length=np.array([3, 5]), delta_softplus=softplus
    )
    (y, final), pull = jax.vjp(f, *padded)
    x, delta, a, b, c, skip, gate, bias, state = operands
    head = [v[:1, :3] for v in (x, delta, b, c, gate)]
    expected, last = recurrence(
        *head[:2], a, *head[2:4], skip, head[4], bias, state[:1], softplus
    )
    np.testing.assert_allclose(y[:1, :3], expected, atol=1e-5)
    np.testing.assert_allclose(final[:1], last, atol=1e-5)
    assert not np.any(y[0, 3:])
    for d in pull((jnp.ones_like(y), final)):
        assert np.isfinite(d).all()


@pytest.mark.full
def test_half_precision_keeps_a_float32_state():
    operands = in_f32(draw())[:5]
    rounded = [y.astype(jnp.bfloat16) for y in operands]
    y, state = selective_scan(*rounded)
    expected, final = selective_scan(*(y.astype(jnp.float32) for y in rounded))
    assert y.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    np.testing.assert_allclose(state, final, rtol=1e-6)
    np.testing.assert_array_equal(y, expected.astype(jnp.bfloat16))


def test_errors_name_the_operand():
    x, delta, a, b, c, *_ = in_f32(draw())
    with pytest.raises(TypeError, match="selective_scan: dim `d` is 3 in `x` but 2"):
        selective_scan(x, delta, a[:2], b, c)
    with pytest.raises(TypeError, match=r"`segment_ids` must have shape \(2, 7\)"):
        selective_scan(x, delta, a, b, c, segment_ids=jnp.zeros((1, 7), int))
    with pytest.raises(TypeError, match=r"groups that divide the 3 channels of `x`"):
        selective_scan(x, delta, a, b[:, :, None], c)
    b2, c2 = (jnp.stack([y, y], 2) for y in (b, c))
    with pytest.raises(TypeError, match=r"groups that divide the 3 channels of `x`"):
        selective_scan(x, delta, a, b2, c2)
    with pytest.raises(TypeError, match="selective_scan: dim `d` is 3 in `x` but 2"):
        selective_scan(x, delta, a[:2], b[:, :, None], c[:, :, None])
    with pytest.raises(ValueError, match="`chunk_size` is 0"):
        selective_scan(x, delta, a, b, c, chunk_size=0)
