"""NaN and inf of one sequence of a packed row stay in it, forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern.primitives.kernel_primitive import REGISTRY
from tests.primitives.delta_rule.test_packed_sequences import RECURRENCES

IDS = np.array([[0, 0, 0, 1, 1, 1, 2, 2]])
T = IDS.shape[1]
STATES = {
    "gated_delta_rule": (1, 2, 4, 3),
    "kimi_delta_attention": (1, 2, 4, 3),
    "state_space_dual": (1, 2, 3, 4),
    "selective_scan": (1, 3, 4),
    "causal_conv1d": (1, 2, 3),
}
CHUNKED = [op for op in STATES if op != "causal_conv1d"]
HUGE = {"gated_delta_rule": 1e20, "kimi_delta_attention": 1e20}  # a state overflows


def operands_of(op):
    """By name, float32: one row of T tokens, and a first state."""
    rng = np.random.default_rng(7)
    names = REGISTRY[op].operands
    found = {}
    for a, x in zip(names, RECURRENCES[op], strict=False):
        shape = (1, T, *x.shape[2:]) if x.shape[:2] == (2, 6) else x.shape
        y = rng.standard_normal(shape).astype(np.float32) / 2
        y = np.abs(y) if a.name in ("step", "delta", "beta") else y
        found[a.name] = -np.abs(y) if a.name in ("g", "a") else y
    found["initial_state"] = rng.standard_normal(STATES[op]).astype(np.float32)
    return found


def is_of_tokens(x):
    return x.shape[:2] == (1, T)


@functools.cache
def both_passes(op, backend, chunk_size):
    """Of the operands and of weights for the results: results and gradients."""
    options = {} if chunk_size is None else {"chunk_size": chunk_size}

    def run(operands, weights):
        def f(operands):
            return getattr(jaxkern, op)(**operands, **options, segment_ids=IDS)

        with jaxkern.backend(backend):
            (out, state), pull = jax.vjp(f, operands)
            [grads] = pull((weights, jnp.ones_like(state)))
        return out, state, grads

    return jax.jit(run)


def cases():
    for op in STATES:
        for backend in ("xla", "auto"):
            for chunk_size in (1, 4, 64) if op in CHUNKED else (None,):
                first = chunk_size == {"xla": 4, "auto": 64}[backend]
                marks = () if first or chunk_size is None else pytest.mark.full
                yield pytest.param(op, backend, chunk_size, marks=marks)


@pytest.mark.parametrize("op, backend, chunk_size", [*cases()])
def test_a_broken_sequence_leaves_the_others_as_they_are(op, backend, chunk_size):
    operands = operands_of(op)
    weights = np.random.default_rng(1).standard_normal((1, T, *out_dims(op)))
    run = both_passes(op, backend, chunk_size)
    expected = run(operands, jnp.float32(weights))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))
    for name, x in operands.items():
        if not is_of_tokens(x) and name != "initial_state":
            continue  # such as `a`, which all sequences have
        for segment in (0,) if name == "initial_state" else (0, 1, 2):
            for value in {np.nan, np.inf, HUGE.get(op, np.inf)}:
                broken = dict(operands, **{name: with_broken(x, segment, value)})
                found = run(broken, jnp.float32(weights))
                what = f"{op} {name} {value} in {segment}"
                check_others(found, expected, segment, what)
                if value is np.nan:  # and it is told
                    own = np.asarray(found[0])[IDS == segment]
                    assert np.isnan(own).any(), what


# query, key, value and weight of one token times so much: all of it stays finite, but
# not what the gradients of decays are made of
LARGE = [(1e5, 1e19, 1e10, 1e10), (1e15, 1e15, 1e25, 1.0), (1e5, 1e5, 1e36, 1.0)]


@pytest.mark.parametrize("op", HUGE)
@pytest.mark.parametrize("factors", LARGE)
def test_gradients_that_overflow_stay_in_their_sequence(op, factors):
    operands = operands_of(op)
    weights = np.random.default_rng(1).standard_normal((1, T, *out_dims(op)))
    run = both_passes(op, "xla", 4)
    expected = run(operands, jnp.float32(weights))
    for segment in (1, 2):
        token = np.flatnonzero(IDS[0] == segment)[-1]
        large = {name: x.copy() for name, x in operands.items()}
        of_token = [large[name] for name in ("query", "key", "value")]
        of_token.append(weights.copy())
        for x, factor in zip(of_token, factors, strict=True):
            x[0, token] *= factor
        found = run(large, jnp.float32(of_token[-1]))
        assert not all(np.isfinite(x).all() for x in jax.tree.leaves(found))
        check_others(found, expected, segment, f"{op} {factors} in {segment}")


def out_dims(op):
    return (3,) if op in ("selective_scan", "causal_conv1d") else (2, 3)


def with_broken(x, segment, value):
    """`value` in the middle of the segment; a state is of the first."""
    x = x.copy()
    if is_of_tokens(x):
        token = np.flatnonzero(IDS[0] == segment)[1]
        x[0, token].flat[0] = value if x[0, token].flat[0] > 0 else -value
    else:
        x.flat[0] = value
    return x


def check_others(found, expected, segment, what):
    others = IDS[0] != segment
    compare(found[0][:, others], expected[0][:, others], f"out of {what}")
    if segment != IDS.max():
        compare(found[1], expected[1], f"state of {what}")
    for name, d in found[2].items():
        e = expected[2][name]
        if is_of_tokens(d):
            compare(d[:, others], e[:, others], f"gradient of {name}, {what}")
        elif name == "initial_state" and segment != 0:
            compare(d, e, f"gradient of {name}, {what}")


def compare(found, expected, what):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=what)


@pytest.mark.parametrize("backend", ["xla", "auto"])
@pytest.mark.parametrize("op", ["gated_delta_step", "kimi_delta_attention_step"])
def test_a_step_that_forgets_all_forgets_nan_too(op, backend):
    rng = np.random.default_rng(0)
    key, value = (rng.standard_normal((1, 2, n)).astype(np.float32) for n in (4, 3))
    g = np.full((1, 2, 4) if "kimi" in op else (1, 2), -np.inf, np.float32)
    token = (key, key, value, g, np.ones((1, 2), np.float32))

    def f(token, state):
        out, new = getattr(jaxkern, op)(*token, state)
        return (out.sum() + (new**2).sum()), (out, new)

    with jaxkern.backend(backend):
        run = jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))
        expected = run(token, np.zeros((1, 2, 4, 3), np.float32))
        for bad in (np.nan, np.inf):
            found = run(token, np.full((1, 2, 4, 3), bad, np.float32))
            jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_decay_that_is_too_small_for_its_dtype_hides_no_nan():
    """Of many tokens it forgets the numbers, but each of them has kept some."""
    operands = operands_of("gated_delta_rule")
    operands["g"][:] = -20.0
    operands["value"][0, 0] = np.nan
    with jaxkern.backend("xla"):
        for chunk_size in (1, 4, 64):
            rule = functools.partial(jaxkern.gated_delta_rule, chunk_size=chunk_size)
            out, state = jax.jit(rule)(**operands)
            assert np.isnan(out).all() and np.isnan(state).all()
