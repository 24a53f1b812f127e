"""Calls that are compiled beside XLA: which they are, and that nobody else notices."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkern import backend, softmax
from jaxkern.cpu.cpu_call import library
from jaxkern.gpu.device import compiling_for
from jaxkern.gpu.triton_call import missing
from jaxkern.lowering import calls_ahead
from jaxkern.lowering.calls_ahead import CallsAhead, calls_compiled_ahead, calls_of
from jaxkern.runtime.trace.events import subscribe

KERNEL = {"module": b"\x00ML\xefIR", "kernel_hash": b"\xff" * 32, "custom": False}
OTHER = {**KERNEL, "kernel_hash": b"\x00" * 32}
MOSAIC, TRITON = calls_ahead.TARGETS


def call(target, x, **attributes):
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(x.shape, x.dtype))(
        x, **attributes
    )


def layers(x):
    """Two kernels of Mosaic, one of them twice, one of Triton, and two other calls."""
    inner = jax.jit(lambda x: call(MOSAIC, x, **KERNEL))
    x = call(MOSAIC, inner(inner(x)), **OTHER)
    x = call(TRITON, x, opaque=b"x\x9c")
    return call("another", x, opaque=b"x\x9c") + call(TRITON, x, scale=np.float32(2.0))


@pytest.fixture(scope="module")
def lowered():
    return jax.jit(layers).lower(jnp.ones(3))


def test_each_kernel_is_found_once_with_its_bytes(lowered):
    found = list(calls_of(lowered.compiler_ir(), calls_ahead.TARGETS))
    assert sorted(found, key=str) == sorted(
        [(MOSAIC, KERNEL), (MOSAIC, OTHER), (TRITON, {"opaque": b"x\x9c"})], key=str
    )


def test_a_program_of_the_call_alone_has_the_same_attributes():
    module = calls_ahead.program(MOSAIC, KERNEL).compiler_ir()
    assert list(calls_of(module, calls_ahead.TARGETS)) == [(MOSAIC, KERNEL)]


def test_each_is_begun_once_for_all_functions(lowered, monkeypatch):
    begun = []
    monkeypatch.setattr(calls_ahead, "compile_call", lambda *what: begun.append(what))
    with ThreadPoolExecutor(1) as workers:
        ahead = CallsAhead(workers)
        assert ahead.begin(lowered) is lowered and ahead.begin(lowered) is lowered
        fewer = jax.jit(lambda x: call(MOSAIC, x, **KERNEL))
        ahead.begin(fewer.lower(jnp.ones(2)))
    assert len(begun) == 3 and begun.count((MOSAIC, KERNEL)) == 1


def test_it_is_compiled_past_the_caches_of_jax(monkeypatch):
    """A target of this package stands for those of jax's plugins."""
    if reason := library().missing:
        pytest.skip(reason)
    compiled, told = [], []
    client = calls_ahead.get_backend()

    def compile_and_load(module, **how):
        compiled.append(client.compile_and_load(module, **how))

    fake = SimpleNamespace(compile_and_load=compile_and_load)
    monkeypatch.setattr(calls_ahead, "get_backend", lambda: fake)
    with subscribe(told.append, kinds=("compile", "cache_hit")):
        calls_ahead.compile_call("jaxkern_norm", {})
    assert len(compiled) == 1 and not told


def test_what_does_not_compile_is_left_to_who_calls_it(monkeypatch):
    def fail():
        raise jax.errors.JaxRuntimeError("no such kernel")

    monkeypatch.setattr(calls_ahead, "get_backend", fail)
    calls_ahead.compile_call(MOSAIC, KERNEL)


def test_without_a_gpu_nothing_is_begun(lowered, monkeypatch):
    for name in ("calls_of", "mosaic_ops"):
        monkeypatch.setattr(calls_ahead, name, lambda *_: pytest.fail("looked at"))
    with calls_compiled_ahead() as ahead:
        ahead.lower_mosaic(jax.make_jaxpr(layers)(jnp.ones(3)))
        assert ahead.begin(lowered) is lowered


@pytest.mark.skipif(missing() is not None, reason="as `missing` says")
def test_a_kernel_of_mosaic_is_lowered_first_and_begun_then(monkeypatch):
    """What the function calls later has the same bytes."""
    begun = []
    monkeypatch.setattr(calls_ahead, "compile_call", lambda *what: begun.append(what))
    monkeypatch.setattr(calls_ahead, "num_processes", lambda: 1)

    def f(x):
        return softmax(softmax(x))

    x = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)
    with compiling_for(90), backend("mosaic_gpu"), calls_compiled_ahead() as ahead:
        traced = jax.jit(f).trace(x)
        ahead.lower_mosaic(traced.jaxpr)
        [(target, attributes)] = begun_after(ahead, begun)
        module = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
    assert list(calls_of(module, calls_ahead.TARGETS)) == [(target, attributes)]


def begun_after(ahead, begun):
    ahead.workers.shutdown()
    return begun
