"""Cuts that no PartitionSpec can say, and how they are read from a sharding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import adamw_update, dequantize, quantize_fp8, rms_norm, rms_norm_quantized
from jaxkern.lowering.sharded_call import LeafFactors, axes_of_dims
from jaxkern.primitives.norm.rms_norm import rms_norm_p
from jaxkern.primitives.norm.rms_norm_quantized import rms_norm_quantized_p
from jaxkern.primitives.optim.adamw import adamw_tree_p
from jaxkern.primitives.quant.fp8 import dequantize_fp8_p, quantize_fp8_p
from jaxkern.testing.checks import opaque_kernels
from jaxkern.testing.sharding_checks import collectives


def mesh_of(**sizes):
    shape, kinds = tuple(sizes.values()), (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(shape, tuple(sizes), axis_types=kinds)


@pytest.mark.parametrize(
    "spec",
    [P(), P("x"), P(None, "y"), P(("y", "x")), P(("x", "y"), "z"), P("z", ("x", "y"))],
    ids=str,
)
def test_the_axes_are_read_back_from_where_the_pieces_lie(spec):
    mesh = mesh_of(x=2, y=4, z=1)
    axes = axes_of_dims(NamedSharding(mesh, spec), (8, 16), mesh)
    asked = [(a,) if isinstance(a, str) else tuple(a or ()) for a in spec]
    asked += [()] * (2 - len(asked))
    assert axes == [tuple(a for a in dim if a != "z") for dim in asked]


def test_an_uneven_cut_is_none():
    mesh = mesh_of(x=8)
    assert axes_of_dims(NamedSharding(mesh, P("x")), (6,), mesh) == [()]


def test_leaves_are_cut_their_own_way():
    """A leaf that is gathered gives the right values all the same."""
    leaves = [jnp.ones((8, 4)), jnp.ones(6)]
    step = functools.partial(adamw_update, step=1, learning_rate=0.1)
    [eqn] = [
        e
        for e in jax.make_jaxpr(step)(leaves, leaves, leaves, leaves).eqns
        if e.primitive is adamw_tree_p
    ]
    avals = ([v.aval for v in side] for side in (eqn.invars, eqn.outvars))
    factors = LeafFactors.of(adamw_tree_p, eqn.params["call"], *avals)
    given = [("m", None), (None,)] * 4 + [()] * (len(eqn.invars) - 8)
    operands, results = factors.specs(factors.cuts(given, {"m": 2}))
    assert operands[:2] == results[:2] == [P("m", None), P(None)]


def test_a_kernel_behind_a_reshape_that_splits_a_cut_dim():
    # Shardy cuts both new dims by a part of the axis, which JAX does not decode
    mesh = mesh_of(m=8)
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    sharded = jax.device_put(x, NamedSharding(mesh, P("m")))

    def f(x):
        return jnp.sin(rms_norm(x.reshape(2, 4, 8))).reshape(8, 8)

    expected = jax.jit(f)(x)
    with opaque_kernels(rms_norm_p):
        compiled = jax.jit(f).lower(sharded).compile()
    np.testing.assert_allclose(compiled(sharded), expected, rtol=1e-6)
    assert "all-gather" in collectives(compiled)


@pytest.mark.full
@pytest.mark.parametrize("spec", [P("m"), P(None, "m")], ids=str)
def test_a_cut_finer_than_the_blocks_of_a_quantiser(spec):
    w = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    sharded = jax.device_put(w, NamedSharding(mesh_of(m=8), spec))

    def codes_and_gradient(w):
        def loss(w):
            q = quantize_fp8(w, block=(2, 4))
            return jnp.sum(jnp.sin(dequantize(q))), q.codes

        return jax.grad(loss, has_aux=True)(w)

    expected = jax.jit(codes_and_gradient)(w)
    with opaque_kernels(quantize_fp8_p), opaque_kernels(dequantize_fp8_p):
        actual = jax.jit(codes_and_gradient)(sharded)
    np.testing.assert_array_equal(actual[1], expected[1])
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_the_gradient_of_a_quantised_norm_with_groups_cut_in_two():
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(s).astype(np.float32) for s in ((4, 16), 16))
    sharded = jax.device_put(x, NamedSharding(mesh_of(m=8), P(None, "m")))

    def loss(x):
        codes, scales = rms_norm_quantized(x, weight, format="int8", block=4)
        y = codes.reshape(4, 4, 4) * scales[..., None]
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(scales))

    expected = jax.jit(jax.grad(loss))(x)
    with opaque_kernels(rms_norm_quantized_p):
        actual = jax.jit(jax.grad(loss))(sharded)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_a_kernel_on_arrays_that_do_not_lie_on_the_mesh_that_is_set(kind, jit):
    x, w = jnp.arange(8.0).reshape(2, 4), jnp.arange(4.0)
    expected = rms_norm(x, w)
    mesh = jax.make_mesh((2,), ("m",), axis_types=(kind,), devices=jax.devices()[:2])
    with opaque_kernels(rms_norm_p), jax.set_mesh(mesh):
        y = jit(rms_norm)(x, w)
    np.testing.assert_allclose(y, expected, rtol=1e-6)
