"""How the executables of a generator are compiled."""

import contextlib
import gc
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxkern.models import decode_loop
from jaxkern.models.decode_loop import GPU_OPTIONS, compiled_in_turn
from jaxkern.runtime.plan.made import made

pytestmark = pytest.mark.smoke
X = jnp.arange(3.0)


def run(monkeypatch, backend, made_as):
    """With what options a function is compiled where JAX runs on `backend`."""
    asked = []

    def noted(lowered, options=None, *args, **how):
        asked.append(options or {})
        return made_as(lowered, options, *args, **how)

    monkeypatch.setattr(decode_loop, "made", noted)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    executables = compiled_in_turn({"double": (jax.jit(lambda x: 2 * x), (X,))})
    assert executables["double"](X).tolist() == [0.0, 2.0, 4.0]
    return asked


def test_gpus_alone_have_options(monkeypatch):
    assert run(monkeypatch, "gpu", made) == [GPU_OPTIONS]
    assert run(monkeypatch, "cpu", made) == [{}]


def test_xla_knows_the_options():
    """Else they are left out unseen: one that is gone needs another."""
    jax.jit(jnp.sin).lower(X).compile(compiler_options=GPU_OPTIONS)


def test_an_xla_that_does_not_know_one_compiles_without(monkeypatch):
    def of_another_version(lowered, options, *args, **how):
        gone = {"xla_gpu_gone": True} if options else {}
        return made(lowered, {**(options or {}), **gone}, *args, **how)

    assert run(monkeypatch, "gpu", of_another_version) == [GPU_OPTIONS, {}]


def test_what_xla_says_of_a_program_is_not_hidden(monkeypatch):
    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")

    with pytest.raises(jax.errors.JaxRuntimeError, match="no memory"):
        run(monkeypatch, "gpu", fail)


def test_kernels_of_one_function_are_begun_before_the_next_is_traced(monkeypatch):
    order = []

    def twice(x):
        order.append("twice is traced")
        assert not gc.isenabled()
        return 2 * x

    def thrice(x):
        order.append("thrice is traced")
        return 3 * x

    ahead = SimpleNamespace(
        lower_mosaic=lambda jaxpr: order.append("Mosaic"), begin=lambda lowered: lowered
    )
    monkeypatch.setattr(
        decode_loop, "calls_compiled_ahead", lambda: contextlib.nullcontext(ahead)
    )
    calls = {f.__name__: (jax.jit(f), (X,)) for f in (twice, thrice)}
    made = compiled_in_turn(calls, ask=lambda jaxpr: order.append("Triton"))
    assert order == [
        *("twice is traced", "Triton", "Mosaic"),
        *("thrice is traced", "Triton", "Mosaic"),
    ]
    assert [made[name](X)[2] for name in calls] == [4, 6]
