"""Plans: the same call, what XLA made of it, and nothing paid before it is asked."""

import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern import runtime

W = jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(8, 16)), jnp.float32)


def chain(w, x):
    """A product, a loop of products, a sort, a view."""

    def step(h, _):
        return jnp.tanh(h @ w), None

    h, _ = jax.lax.scan(step, jax.nn.gelu(x @ w), length=3)
    return h.reshape(-1), jax.lax.sort(h)


@pytest.fixture(scope="module")
def plan():
    return runtime.compile(chain, W, X)


@pytest.mark.smoke
def test_a_plan_is_called_as_the_function(plan):
    for y, expected in zip(plan(W, X), chain(W, X), strict=True):
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def python_calls(f, *args):
    """Names of the Python functions that a call enters."""
    entered = []

    def note(frame, event, _):
        if event == "call":
            entered.append(frame.f_code.co_qualname)

    f(*args)  # the first call makes the fast path
    sys.setprofile(note)
    try:
        f(*args)
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.smoke
def test_a_call_adds_one_frame_to_that_of_jax(plan):
    bare = python_calls(plan.compiled, W, X)
    assert python_calls(plan, W, X) == ["Plan.__call__", *bare]


def test_nothing_is_read_before_it_is_asked_for():
    plan = runtime.compile(jnp.sin, X)
    plan(X)
    assert {"module", "_instructions", "_memory", "_dump"}.isdisjoint(vars(plan))


def test_nothing_below_imports_the_runtime():
    """So it costs nothing, in time or memory, where it is not used."""
    package = Path(jaxkern.__file__).parent
    for folder in ("primitives", "lowering", "triton", "formats"):
        for file in (package / folder).rglob("*.py"):
            assert "jaxkern.runtime" not in file.read_text(), file
    assert "jaxkern.runtime" not in (package / "__init__.py").read_text()


def test_a_jaxpr_is_the_same_with_and_without_a_plan(plan):
    assert plan.source("jaxpr") == str(jax.make_jaxpr(chain)(W, X))


@pytest.mark.smoke
def test_instructions_of_a_loop(plan):
    found = plan.instructions()
    assert len(plan) == len(found) > 5
    assert plan.nops > 0
    assert next(i for i in found if i.opcode == "while").bytes == 0
    # x @ w once, h @ w three times, each 8 x 16 x 16 multiplications and additions
    inside = [i for i in found if "while/body" in i.op_name and "dot" in i.op_name]
    outside = [i for i in found if i.op_name == "jit(chain)/dot_general"]
    assert [i.runs for i in inside] == [3]
    assert [i.runs for i in outside] == [1]
    for i in (*inside, *outside):
        assert i.flops == 2 * 8 * 16 * 16
        assert i.bytes == 4 * (8 * 16 + 16 * 16 + 8 * 16)
        assert i.shape == "f32[8,16]"
    names = [i.name for i in found]
    order = [names.index(n.name) for n in (*outside, *inside)]
    assert order == sorted(order)


def test_every_instruction_is_in_the_text_of_the_module(plan):
    text = plan.source("hlo")
    for i in plan.instructions():
        start = i.shape.split("[")[0].split("(")[0]  # layouts are in the text alone
        assert f"%{i.name} = {start}" in text
        assert i.name in str(plan)


def test_flops_of_a_product_are_those_that_xla_counts():
    plan = runtime.compile(jnp.matmul, W, W)
    assert sum(i.flops or 0 for i in plan.instructions()) == 2 * 16**3
    assert plan.compiled.cost_analysis()["flops"] == 2 * 16**3


def test_flops_of_a_convolution():
    image, kernel = jnp.ones((1, 2, 6, 6)), jnp.ones((3, 2, 3, 3))
    plan = runtime.compile(
        lambda x, k: jax.lax.conv(x, k, (1, 1), "VALID"), image, kernel
    )
    expected = 2 * math.prod((3, 4, 4)) * math.prod((2, 3, 3))
    assert sum(i.flops or 0 for i in plan.instructions()) == expected


def test_what_is_only_indexed_counts_only_what_is_taken():
    """One layer of stacked weights, and one slot of a cache written in place."""
    stack = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    i = jax.ShapeDtypeStruct((), jnp.int32)
    row = jax.ShapeDtypeStruct((1, 256), jnp.float32)

    def read(stack, i):
        return jax.lax.dynamic_slice_in_dim(stack, i, 1) * 2

    def write(stack, row, i):
        return jax.lax.dynamic_update_slice_in_dim(stack, row * 2, i, 0)

    reading = runtime.compile(read, stack, i)
    assert 2 * 1024 <= sum(k.bytes for k in reading.instructions()) < 6 * 1024
    writing = runtime.compile(write, stack, row, i, donate=0)
    assert 2 * 1024 <= sum(k.bytes for k in writing.instructions()) < 6 * 1024


@pytest.mark.smoke
def test_report(plan):
    report = plan.report()
    assert report.equations["dot_general"] == 2
    assert report.equations["scan"] == 1
    assert sum(report.instructions.values()) == len(plan)
    assert report.views == plan.nops
    assert not report.command_buffers.sizes
    shown = str(report)
    assert "2 dot_general" in shown and "no command buffer: a CPU has none" in shown


def test_sources():
    weight = jnp.ones(16)
    plan = runtime.compile(lambda x: jaxkern.rms_norm(x, weight) @ W, X)
    assert "rms_norm" in plan.source("jaxpr")
    assert "stablehlo.dot_general" in plan.source("stablehlo")
    with pytest.raises(ValueError, match="jaxpr, stablehlo or hlo, got 'sass'"):
        plan.source("sass")


def test_dispatch_overhead_is_measured_and_small(plan):
    assert 0 < plan.dispatch_overhead(W, X, calls=20) < 0.01
    assert 0 < plan.dispatch_overhead(calls=20) < 0.01


def test_a_jitted_function_keeps_its_static_arguments():
    f = jax.jit(lambda x, n: x * n, static_argnums=1)
    np.testing.assert_array_equal(runtime.compile(f, X, 3)(X), X * 3)


def test_a_plan_without_instructions():
    plan = runtime.compile(lambda x: x, X, donate=0)
    assert plan and len(plan) <= 1
    np.testing.assert_array_equal(plan(X + 0), X)


def test_donated_arguments_are_taken():
    x = X + 0
    y = runtime.compile(lambda x: x + 1, x, donate=0)(x)
    assert x.is_deleted()
    np.testing.assert_array_equal(y, X + 1)


def test_options_reach_the_compiler():
    """A name that XLA does not know is refused, so known ones have arrived."""
    for command_buffers in ("auto", "off", "all"):
        plan = runtime.compile(jnp.sin, X, command_buffers=command_buffers)
        np.testing.assert_allclose(plan(X), np.sin(X), rtol=1e-6)
    with pytest.raises(ValueError, match="must be one of auto, off, all, got 'some'"):
        runtime.compile(jnp.sin, X, command_buffers="some")
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_thing"):
        runtime.compile(jnp.sin, X, compiler_options={"xla_no_such_thing": 1})


def test_a_plan_knows_its_policy_its_limit_and_its_faults():
    x, w = jnp.ones((8, 64)), jnp.ones((64, 64))
    with runtime.policy("bf16"):
        plan = runtime.compile(jaxkern.linear, x, w)
    assert plan.policy is not None and plan.policy.compute == jnp.bfloat16
    assert str(plan.policy) in str(plan.report())
    assert any("bf16" in i.shape for i in plan.instructions())
    assert runtime.compile(jaxkern.linear, x, w).policy is None

    checked = runtime.limited(plan)
    with runtime.memory_limit(1), pytest.raises(runtime.MemoryLimitExceeded):
        checked(x, w)
    with runtime.memory_limit(runtime.allocated_bytes() + (1 << 20)):
        np.testing.assert_array_equal(checked(x, w), plan(x, w))

    with runtime.testing.inject_faults("compile", error=OSError("no compiler")):
        with pytest.raises(OSError, match="no compiler"):
            runtime.compile(jaxkern.linear, x, w)
