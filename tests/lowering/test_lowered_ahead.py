"""Operators that were lowered before the function that calls them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import rms_norm
from jaxkern.lowering import lower
from jaxkern.lowering.lowered_ahead import lowered_ahead
from jaxkern.primitives.call import Backend, backend_context
from jaxkern.primitives.norm.rms_norm import rms_norm_p
from jaxkern.testing.checks import own_rows
from tests.lowering.test_sharded_call import mesh_of

X = np.arange(64.0, dtype=np.float32).reshape(8, 8)


@pytest.fixture
def norms():
    """A function that JAX has not met."""

    def two(x, eps=1e-6):
        return rms_norm(jnp.sin(rms_norm(x, eps=eps)), eps=eps)

    return two


@pytest.fixture
def shapes():
    """Of what a kernel of `rms_norm` is traced with, which is its reference."""
    traced = []

    def kernel(*operands, **static):
        traced.append(operands[0].shape)
        return rms_norm_p.reference(*operands, **static)

    with own_rows(rms_norm_p), backend_context(Backend("counted", strict=True)):
        row = lower.Row("counted", kernel, lower.never_refuses)
        for platform in ("cpu", "cuda"):
            lower.add_row(rms_norm_p, platform, row)
        yield traced


def add_first(add, traced):
    """The first `rms_norm` of a function."""
    eqn = next(e for e in traced.jaxpr.eqns if e.primitive is rms_norm_p)
    static = dict(eqn.params)
    avals, call = [v.aval for v in eqn.invars], static.pop("call")
    row = lower.choose(rms_norm_p, "cuda", avals, call, static).row
    assert row is not None
    return add(rms_norm_p, row.kernel, avals, call, static)


def test_a_function_takes_it_from_there(norms, shapes):
    traced = jax.jit(norms).trace(X)
    with lowered_ahead() as add:
        module = add_first(add, traced)
        assert module is add_first(add, traced) and shapes == [X.shape]
        compiled = traced.lower().compile()
        assert shapes == [X.shape]  # for both calls
    with backend_context(Backend("xla")):
        np.testing.assert_allclose(compiled(X), norms(X), rtol=1e-6)


@pytest.mark.parametrize("other", ["shape", "option", "mesh", "afterwards"])
def test_what_differs_is_lowered_as_ever(norms, shapes, other):
    jitted = jax.jit(norms, static_argnums=1)
    with lowered_ahead() as add:
        add_first(add, jitted.trace(X))
        shapes.clear()
        if other == "shape":
            jitted.lower(X[:4])
        elif other == "option":
            jitted.lower(X, 1e-3)
        elif other == "mesh":
            jitted.lower(jax.device_put(X, NamedSharding(mesh_of(m=8), P("m"))))
    if other == "afterwards":
        jitted.lower(X)
    assert shapes


def test_what_cannot_be_lowered_is_not_added(norms, shapes):
    def fail(*_, **__):
        raise NotImplementedError("no such kernel")

    traced = jax.jit(norms).trace(X)
    eqn = next(e for e in traced.jaxpr.eqns if e.primitive is rms_norm_p)
    static = dict(eqn.params)
    avals, call = [v.aval for v in eqn.invars], static.pop("call")
    with lowered_ahead() as add:
        with pytest.raises(NotImplementedError, match="no such kernel"):
            add(rms_norm_p, fail, avals, call, static)
        traced.lower()
    assert shapes
