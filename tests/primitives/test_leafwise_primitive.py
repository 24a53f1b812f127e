"""An op over all leaves: one equation, the rules of its leaves, a mesh cut by leaf."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern import adamw_update, backend, explain
from jaxkern.primitives.activation.softmax import softmax_p
from jaxkern.primitives.leafwise_primitive import leafwise_primitive
from jaxkern.primitives.optim.adamw import adamw_p, adamw_tree_p
from jaxkern.testing import checks, sharding_checks

pytestmark = pytest.mark.smoke
OPTIONS = dict(b1=0.9, b2=0.6, eps=0.3, eps_root=0.2, weight_decay=0.1)
SHAPES = {"w": (8, 4), "rows": (16, 2), "bias": (8,), "scale": (), "none": (0, 3)}
SPECS = {"w": P("m"), "rows": P(None, "n"), "bias": P("m"), "scale": P(), "none": P()}


def trees():
    rng = np.random.default_rng(0)
    return [
        {n: jnp.asarray(rng.uniform(0.5, 1, s), jnp.float32) for n, s in SHAPES.items()}
        for _ in range(4)
    ]


def trees_without_empty_leaves():
    """The CPU compiler of jax 0.11.2 crashes on empty operands of shard_map."""
    return [{n: x for n, x in tree.items() if x.size} for tree in trees()]


def update(*state):
    return adamw_update(*state, 3, learning_rate=0.1, **OPTIONS)


def leaf_by_leaf(*state):
    new = {n: adamw_p(*(t[n] for t in state), 0.1, 3, **OPTIONS) for n in SHAPES}
    return tuple({n: new[n][i] for n in SHAPES} for i in range(3))


def assert_near(found, expected, rtol=1e-6):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for y, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert y.shape == e.shape
        np.testing.assert_allclose(y, e, rtol=rtol)


def test_one_equation_does_what_its_leaves_do():
    assert_near(update(*trees()), leaf_by_leaf(*trees()))
    assert_near(jax.jit(update)(*trees()), leaf_by_leaf(*trees()))
    names = [e.primitive.name for e in jax.make_jaxpr(update)(*trees()).jaxpr.eqns]
    assert names.count("adamw_tree") == 1 and "adamw" not in names


def test_a_tree_without_leaves():
    assert adamw_update({}, {}, {}, {}, 1, learning_rate=0.1) == ({}, {}, {})


def test_vmap_and_derivatives_are_those_of_the_leaves():
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x, 3 * x]), trees())
    of_leaves = jax.jit(jax.vmap(leaf_by_leaf))
    assert_near(jax.vmap(update)(*stacked), of_leaves(*stacked))
    axes = (0, None, None, 0)
    mixed = (stacked[0], *trees()[1:3], stacked[3])
    found = jax.vmap(update, axes)(*mixed)
    assert_near(found, jax.jit(jax.vmap(leaf_by_leaf, axes))(*mixed))

    def loss(f):
        return lambda *state: sum(jnp.sin(y).sum() for y in jax.tree.leaves(f(*state)))

    every = (0, 1, 2, 3)
    slopes = jax.jit(jax.grad(loss(update), every))(*trees())
    expected = jax.jit(jax.grad(loss(leaf_by_leaf), every))(*trees())
    assert_near(slopes, expected, 1e-5)


def test_a_kernel_gets_the_lists_and_each_leaf_is_cut_its_own_way():
    mesh = jax.make_mesh((4, 2), ("m", "n"), axis_types=(AxisType.Auto,) * 2)
    state = [
        {n: jax.device_put(x, NamedSharding(mesh, SPECS[n])) for n, x in tree.items()}
        for tree in trees()
    ]
    expected = update(*trees())
    with checks.opaque_kernels(adamw_tree_p):
        [row] = explain(update, *state).rows
        assert row.runs.startswith("opaque")
        compiled = jax.jit(update).lower(*state).compile()
        found = compiled(*state)
    assert not re.findall(sharding_checks.COLLECTIVES, compiled.as_text())
    assert_near(found, expected)
    for new in found:
        assert {n: x.sharding.spec for n, x in new.items() if x.size} == {
            n: spec for n, spec in SPECS.items() if SHAPES[n] != (0, 3)
        }


def test_explicit_meshes_run_the_kernel_leaf_by_leaf():
    mesh = jax.make_mesh((4, 2), ("m", "n"), axis_types=(AxisType.Explicit,) * 2)
    given = trees_without_empty_leaves()
    expected = update(*given)
    with jax.set_mesh(mesh), checks.opaque_kernels(adamw_tree_p):
        state = [
            {n: jax.device_put(x, P(*SPECS[n])) for n, x in tree.items()}
            for tree in given
        ]
        found = jax.jit(update)(*state)
        assert jax.typeof(found[0]["rows"]).sharding.spec == P(None, "n")
        assert_near(found, expected)
        uncut = {**state[1], "w": jax.device_put(given[1]["w"], P(None, None))}
        with pytest.raises(ValueError, match=r"`grad\[.\]` is cut as .* reshard it"):
            update(state[0], uncut, *state[2:])


def test_inside_shard_map_a_leaf_varies_as_its_own_arrays_do():
    mesh = jax.make_mesh((4, 2), ("m", "n"), axis_types=(AxisType.Auto,) * 2)
    state = trees_without_empty_leaves()
    specs = {n: P() if n == "rows" else SPECS[n] for n in state[0]}
    f = jax.shard_map(update, mesh=mesh, in_specs=(specs,) * 4, out_specs=(specs,) * 3)
    assert_near(jax.jit(f)(*state), update(*state))


def test_strict_and_float64_refuse_in_words():
    with pytest.raises(ValueError, match="adamw_tree: backend triton strict on cpu"):
        with backend("triton", strict=True):
            update(*trees())
    with jax.enable_x64(True):
        state = jax.tree.map(lambda x: x.astype(jnp.float64), trees())
        with backend("triton"):
            text = str(explain(update, *state, platform="cuda"))
    assert "`param[0]` is float64" in text or "not installed" in text


def test_an_op_with_dims_of_its_own_has_no_leaves():
    with pytest.raises(TypeError, match=r"softmax_tree: .* must have dims `...`"):
        leafwise_primitive(softmax_p)
