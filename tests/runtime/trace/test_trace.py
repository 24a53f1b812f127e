"""Slots, operations and plans; opaque work is found wherever it hides."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from jaxkern.runtime.trace.trace import trace

W = {"a": jnp.linspace(-1, 1, 9).reshape(3, 3), "b": jnp.ones(3)}
X = jnp.arange(3.0)


def f(p, x):
    return jnp.tanh(x @ p["a"] + 2 * p["b"]), x


def test_slots_of_weights_come_first():
    tr = trace(f, W, X, frozen=W)
    assert tr.frozen_slots == (0, 1) and tr.input_slots == (0, 1, 2)
    assert [op.name for op in tr.ops] == ["dot_general", "mul", "add", "tanh"]
    dot, double, add, tanh = tr.ops
    assert (dot.inputs, dot.outputs) == ((2, 0), (3,))
    assert (double.inputs, double.outputs) == ((None, 1), (4,))
    assert double.constants == {0: 2.0} and dot.constants == {}
    assert (add.inputs, tanh.inputs, tanh.outputs) == ((3, 4), (5,), (6,))
    assert dot.params["dimension_numbers"] == (((0,), (0,)), ((), ()))
    assert tr.output_slots == (6, 2)
    assert tr.next_slot == len(tr.slots) == len(tr.slot_shapes) == 7
    assert tr.slot_shapes[0] == jax.ShapeDtypeStruct((3, 3), jnp.float32)
    assert tr.slot_for(W["b"]) == 1 and tr.slot_for(X) == 2
    with pytest.raises(KeyError, match="neither an argument nor a frozen value"):
        tr.slot_for(jnp.ones(3))
    assert not tr.has_opaque_ops


def test_weights_that_a_function_closes_over_and_tied_weights():
    tied = {"a": W["a"], "again": W["a"], "unused": W["b"]}
    other = jnp.ones(3)
    tr = trace(lambda x: x @ W["a"] + other, X, frozen=tied)
    assert tr.frozen_slots == (0, 1, 2)  # a, unused, and what was closed over
    assert tr.ops[0].inputs == (3, 0) and tr.ops[1].inputs == (4, 2)
    np.testing.assert_allclose(tr.to_plan().run(X), X @ W["a"] + other, rtol=1e-6)


def test_a_plan_binds_the_frozen_arguments():
    plan = trace(f, W, X, frozen=W).to_plan()
    x = jnp.float32([3, -1, 0.5])
    for a, b in zip(plan.run(x), f(W, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    np.testing.assert_array_equal(plan(x)[1], x)
    assert [op.name for op in plan.instructions][-1] == "tanh"
    assert plan.slot_shapes[6].shape == (3,)
    with pytest.raises(TypeError, match=r"takes 1 arguments, got 2.*bound"):
        plan.run(W, x)
    with pytest.raises(TypeError, match=r"for .*float32\[3\], got .*float32\[4\]"):
        plan.run(jnp.ones(4))
    with pytest.raises(TypeError, match="the plan is for arguments"):
        plan.run((x, x))
    # A partly frozen argument is passed; shapes without values cannot be bound.
    assert trace(f, W, X, frozen=W["a"]).to_plan().run(W, x)[0].shape == (3,)
    spec = jax.eval_shape(lambda: W)
    with pytest.raises(ValueError, match="a frozen argument has no values"):
        trace(f, spec, X, frozen=spec).to_plan()


def untraced_by_the_origin(x, key):
    zero = jnp.zeros_like(x)  # Zeros, Zero
    full = jnp.full_like(x, 2.5)  # Fill
    copied = jnp.copy(x)  # Copy
    drawn = jax.random.uniform(key, x.shape)  # RandomUniform
    added = zero.at[jnp.array([1, 1])].add(x[:2])  # ScatterAdd
    hot = jax.nn.one_hot(jnp.argmax(x), 3)  # OneHot
    slope = jax.grad(lambda x: jnp.tanh(x).sum())(x)  # TanhPrime
    return full * copied + drawn + added + hot + slope


def test_d32_what_fills_copies_scatters_and_draws_is_recorded():
    """The origin leaves these out: a replay computes with what slots held before."""
    tr = trace(untraced_by_the_origin, X, jax.random.key(0))
    found = {op.name for op in tr.ops}
    assert found >= {
        "broadcast_in_dim",
        "copy",
        "random_bits",
        "scatter-add",
        "eq",
        "tanh",
    }
    filled = set(tr.frozen_slots) | set(tr.input_slots)
    for op in tr.ops:  # every slot is filled before it is read
        assert filled >= {s for s in op.inputs if s is not None}
        filled |= set(op.outputs)
    plan = tr.to_plan()
    for seed in (1, 2):
        x, key = jax.random.normal(jax.random.key(seed), (3,)), jax.random.key(seed)
        expected = jax.jit(untraced_by_the_origin)(x, key)
        np.testing.assert_allclose(plan.run(x, key), expected, rtol=1e-5)


def host_sine(x):
    return np.sin(x)


def hidden(x):
    """Opaque work in every kind of body."""

    @jax.custom_jvp
    def custom(x):
        return io_callback(host_sine, x, x)

    custom.defjvp(lambda p, t: (custom(*p), t[0]))

    @jax.custom_vjp
    def foreign(x):
        return jax.ffi.ffi_call("a_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    foreign.defvjp(lambda x: (foreign(x), None), lambda _, g: (g,))

    def step(x, _):
        jax.debug.print("x is {}", x)
        jax.debug.callback(host_sine, x)
        branch = lambda x: jax.pure_callback(host_sine, x, x)  # noqa: E731
        return jax.lax.cond(x[0] > 0, branch, jnp.cos, x), None

    def loop(x):
        call = lambda x: jax.pure_callback(host_sine, x, x)  # noqa: E731
        return jax.lax.while_loop(lambda x: x[0] < 0, call, foreign(custom(x)))

    x, _ = jax.lax.scan(step, x, length=2)
    return jax.jit(jax.checkpoint(loop))(x)


def test_opaque_work_is_found_in_bodies_and_refused():
    tr = trace(hidden, X)
    assert [str(op) for op in tr.opaque_ops] == [
        "debug_print of 'x is {}' inside scan",
        "debug_callback of host_sine inside scan",
        "pure_callback of host_sine inside scan/cond",
        "io_callback of host_sine inside remat2/custom_jvp_call",
        "ffi_call of 'a_target' inside remat2/custom_vjp_call",
        "pure_callback of host_sine inside remat2/while",
    ]
    assert tr.has_opaque_ops
    with pytest.raises(ValueError, match=r"opaque work: debug_print.*scan/cond.*allow"):
        tr.to_plan()


def test_opaque_work_runs_where_it_is_allowed():
    tr = trace(lambda x: jax.pure_callback(host_sine, x, x) + 1, X)
    with pytest.raises(ValueError, match="pure_callback of host_sine"):
        tr.to_plan()
    found = tr.to_plan(allow_opaque=True).run(X)
    np.testing.assert_allclose(found, np.sin(X) + 1, rtol=1e-6)


def test_a_plan_is_shared_by_threads():
    plan = trace(f, W, X, frozen=W).to_plan()
    found = {}

    def call(k):
        found[k] = plan.run(X + k)[0]

    threads = [threading.Thread(target=call, args=(k,)) for k in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for k in range(4):
        np.testing.assert_allclose(found[k], f(W, X + k)[0], rtol=1e-6)
