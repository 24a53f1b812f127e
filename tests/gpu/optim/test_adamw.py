"""AdamW on a GPU: a tree of hundreds of leaves in place, special values, a mesh."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import adamw_update, backend, explain
from jaxkern.testing import sharding_checks
from tests.gpu.truth import on_a_gpu

pytestmark = on_a_gpu
SHAPES = [(), (1,), (3, 5), (0, 4), (2048,), (16384,), (16385,), (40001,), (640, 513)]
OPTIONS = dict(b1=0.9, b2=0.95, eps=1e-3, weight_decay=0.1)


def state_of(shapes, dtype, seed=0):
    """Parameters, gradients and float32 moments; every third leaf is in float32."""
    rng = np.random.default_rng(seed)

    def tree(low, given):
        return [
            jnp.asarray(rng.uniform(low, 1, s), given if k % 3 else jnp.float32)
            for k, s in enumerate(shapes)
        ]

    return tree(-1, dtype), tree(-1, dtype), tree(-1, "float32"), tree(0, "float32")


def update(params, grads, m, v, step):
    return adamw_update(params, grads, m, v, step, learning_rate=0.1, **OPTIONS)


def assert_near(found, expected):
    for y, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert y.dtype == e.dtype and y.shape == e.shape
        tolerance = 3e-6 if y.dtype == jnp.float32 else 8e-3
        y, e = (np.asarray(x, np.float64) for x in (y, e))
        np.testing.assert_allclose(y, e, rtol=tolerance, atol=tolerance)


def exact_update(params, grads, m, v, step):
    """`update` in float64; leaves in the dtypes that they had."""

    def leaf(p, g, m, v):
        dtypes = p.dtype, m.dtype, v.dtype
        p, g, m, v = (np.asarray(x, np.float64) for x in (p, g, m, v))
        b1, b2 = OPTIONS["b1"], OPTIONS["b2"]
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        m_hat, v_hat = m / (1 - b1**step), v / (1 - b2**step)
        slope = m_hat / (np.sqrt(v_hat) + OPTIONS["eps"])
        p = p - 0.1 * (slope + OPTIONS["weight_decay"] * p)
        return [np.asarray(x, t) for x, t in zip((p, m, v), dtypes, strict=True)]

    new = [leaf(*x) for x in zip(params, grads, m, v, strict=True)]
    return tuple(map(list, zip(*new, strict=True)))


@pytest.mark.parametrize("repeat", [34, 130])  # 272 leaves with elements, and 1040
def test_large_trees_in_float64(repeat):
    state = state_of(SHAPES[:5] + [(300 + k,) for k in range(4)], "bfloat16")
    state = tuple(leaves * repeat for leaves in state)
    with backend("triton", strict=True):
        [row] = explain(update, *state, 3, platform="cuda").rows
        assert len(row.launches) == (1 if repeat == 34 else 2)
        found = jax.jit(update)(*state, 3)
    assert_near(found, exact_update(*state, 3))


def test_steps_of_optax():
    optax = pytest.importorskip("optax")
    params, grads, *_ = state_of(SHAPES, "float32")
    zeros = [jnp.zeros(x.shape) for x in params]
    optimiser = optax.adamw(0.1, **OPTIONS)

    @jax.jit
    def by_optax(params, state):
        updates, state = optimiser.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    m, v, ours, theirs = zeros, zeros, params, params
    state = optimiser.init(theirs)
    for step in range(1, 4):
        with backend("triton", strict=True):
            ours, m, v = jax.jit(update)(ours, grads, m, v, step)
        theirs, state = by_optax(theirs, state)
    assert_near(ours, theirs)
    assert_near((m, v), (state[0].mu, state[0].nu))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("repeat", [1, 34])  # 306 leaves of several dtypes
def test_adamw_of_trees(dtype, repeat):
    state = state_of(SHAPES * repeat, dtype)
    with backend("xla"):
        expected = jax.jit(update)(*state, 3)
    with backend("triton", strict=True):
        run = jax.jit(update, donate_argnums=(0, 2, 3))
        assert_near(jax.jit(lambda *s: update(*s))(*state, 3), expected)  # copies
        places = [x.unsafe_buffer_pointer() for x in state[0] if x.size]
        found = run(*state, 3)
    assert_near(found, expected)
    assert [x.unsafe_buffer_pointer() for x in found[0] if x.size] == places
    assert all(x.is_deleted() for x in state[0] if x.size)


def test_adamw_in_a_loop():
    def steps(state, grads):
        def step(t, state):
            return update(state[0], grads, *state[1:], t)

        return jax.lax.fori_loop(1, 6, step, state)

    params, grads, m, v = state_of(SHAPES, "float32")
    with backend("xla"):
        expected = jax.jit(lambda *x: steps(*x))((params, m, v), grads)
    with backend("triton", strict=True):
        found = jax.jit(lambda *x: steps(*x))((params, m, v), grads)
    assert_near(found, expected)


def test_adamw_of_special_values():
    inf, nan = jnp.inf, jnp.nan
    g = jnp.array([0.0, inf, -inf, nan, 1e30, 1e-30, 0.0, 1.0])
    m = jnp.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, nan, 1.0])
    v = jnp.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, inf])
    with backend("xla"):
        expected = jax.jit(update)([g + 1], [g], [m], [v], 1)
    with backend("triton", strict=True):
        found = jax.jit(update)([g + 1], [g], [m], [v], 1)
    assert_near(found, expected)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
def test_each_leaf_is_cut_its_own_way():
    mesh = jax.make_mesh((2,), ("m",), axis_types=(AxisType.Auto,))
    specs = [P("m"), P(None, "m"), P()]
    state = state_of([(64, 32), (6, 128), (5,)], "float32")
    cut = [
        [
            jax.device_put(x, NamedSharding(mesh, s))
            for x, s in zip(leaves, specs, strict=True)
        ]
        for leaves in state
    ]
    with backend("triton", strict=True):
        compiled = jax.jit(update).lower(*cut, 3).compile()
        found = compiled(*cut, 3)
    assert not re.findall(sharding_checks.COLLECTIVES, compiled.as_text())
    with backend("xla"):
        assert_near(found, jax.jit(update)(*state, 3))


@pytest.mark.parametrize("repeat", [1, 34])
def test_a_copy_and_a_scale_in_the_same_launch(repeat):
    """Leaves with a copy of their own dtype, of another, and sizes with a rest."""
    params, grads, m, v = state_of(SHAPES * repeat, "float32")
    grads = [g.astype("bfloat16" if k % 2 else "float32") for k, g in enumerate(grads)]
    dtypes = ["bfloat16", "float16", "float32"]
    old = [jnp.full(p.shape, jnp.nan, dtypes[k % 3]) for k, p in enumerate(params)]

    @functools.partial(jax.jit, donate_argnums=(0, 2, 3, 4))
    def scaled(params, grads, m, v, copy):
        options = dict(learning_rate=0.1, grad_scale=0.5, copy=copy, **OPTIONS)
        return adamw_update(params, grads, m, v, 3, **options)

    expected = exact_update(params, [0.5 * g.astype("float32") for g in grads], m, v, 3)
    with backend("triton", strict=True):
        *found, copies = scaled(params, grads, m, v, old)
    assert_near(tuple(found), expected)
    for copy, p, k in zip(copies, found[0], range(len(copies)), strict=True):
        np.testing.assert_array_equal(copy, p.astype(dtypes[k % 3]))
